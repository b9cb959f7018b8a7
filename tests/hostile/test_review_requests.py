"""Random requests to the review server are answered, and never by an error of the server."""

import json
import random
from pathlib import Path

import pytest
from fuzz import HOSTILE
from review_helpers import Client, make_audited_items, serve

POSTS = ("/api/decide", "/api/accept", "/api/undo", "/api/export")
GETS = ("/api/items", "/api/pairs", "/api/preview", "/api/near/{}", "/picture/{}", "/trusted/{}", "/{}")
NAMES = ("tab", "step", "choices", "row", "seen", "action", "label", "order", "filter", "offset", "limit", "class", "p")


def _request(client: Client, rng: random.Random) -> int:
    if rng.random() < 0.4:
        value = rng.choice(("0", "-1", "1e9", "../../etc/passwd", "%00", "999999999999", "a", "%F0%9F", "nan"))
        query = "&".join(f"{rng.choice(NAMES)}={rng.choice(('', '-1', 'nan', 'x', '9' * 30, '%22'))}" for _ in range(3))
        return client.ask("GET", f"{rng.choice(GETS).format(value)}?{query}")[0]
    choices = [{name: rng.choice(HOSTILE) for name in rng.sample(NAMES, 5)} for _ in range(rng.randrange(3))]
    if choices and rng.random() < 0.7:
        good = {"row": 1, "seen": 0, "action": "change", "label": "b"}
        choices[0] = {**good, rng.choice([*good]): rng.choice(HOSTILE)}
    body = {"tab": "t", "step": "s", "choices": choices, rng.choice(NAMES): rng.choice(HOSTILE)}
    content = json.dumps(body).encode()
    return client.ask(
        "POST", rng.choice(POSTS), content[: rng.randrange(len(content))] if rng.random() < 0.1 else content
    )[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_requests(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    with serve(make_audited_items(30, ("a", "b", "c")), tmp_path / "review") as client:
        answers = [_request(client, rng) for _ in range(150)]
        assert {status for status in answers if status >= 500} <= {507}
        assert client.ask("GET", "/api/session")[0] == 200
    assert "Traceback" not in capfd.readouterr().err
