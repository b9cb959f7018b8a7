"""A review server that is killed again and again: each line of input starts it in a new process.

It answers with the number of the process, the port and the key of the page. Only the first start imports torch.
"""

import os
import sys
from pathlib import Path

from review_helpers import make_audited_items

from warpi.audit.decisions import Store
from warpi.review.page_requests import ReviewSession
from warpi.review.server import Server


def main(folder: Path, rows: int) -> None:
    items = make_audited_items(rows, ("a", "b", "c"))
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            store = Store(folder / "decisions.sqlite", items.identity)
            server = Server(ReviewSession(items, store, folder, {"data": "x", "noise": "given", "seed": 0}))
            print(os.getpid(), server.server_port, server.token, flush=True)
            server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
