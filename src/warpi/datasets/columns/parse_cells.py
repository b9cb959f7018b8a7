"""Read numbers and dates that are written as text: find out how they are written, then parse the cells."""

import re
from collections import Counter
from collections.abc import Callable
from datetime import date

import numpy as np
from numpy.typing import NDArray

from warpi.data.numeric import Floats
from warpi.datasets.columns.raw import Raw, Words
from warpi.datasets.delimited_files import GAPS, is_number

_FEW_VALUES = 20  # a column with at most this many different values may contain codes
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = rf"(?P<name>{'|'.join(_MONTHS)})[a-z]*\.?"
_TIME = (
    r"([T ]+(?P<hour>\d\d?):(?P<minute>\d\d)(:(?P<second>\d\d([.,]\d+)?))?( ?(?P<half>[ap])m)?"
    r"( ?(Z|UTC|(?P<zone>[+-]\d\d):?(?P<zone_minute>\d\d)))?)?"
)
_DATES = {  # how dates may be written, by the order of their parts
    order: [re.compile(form + _TIME, re.IGNORECASE) for form in forms]
    for order, forms in {
        "ymd": [r"(?P<y>\d{4})(?P<mark>[-/.])(?P<m>\d\d?)((?P=mark)(?P<d>\d\d?))?"],
        "dmy": [
            r"(?P<d>\d\d?)(?P<mark>[-/.])(?P<m>\d\d?)(?P=mark)(?P<y>\d{4}|\d\d)",
            rf"(?P<d>\d\d?)[- ]{_MONTH}[- ,]+(?P<y>\d{{4}}|\d\d)",
        ],
        "mdy": [
            r"(?P<m>\d\d?)(?P<mark>[-/.])(?P<d>\d\d?)(?P=mark)(?P<y>\d{4}|\d\d)",
            rf"{_MONTH} (?P<d>\d\d?),? (?P<y>\d{{4}})",
        ],
    }.items()
}
_SIGNS = "%$€£¥₹ \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"  # at the ends of a number
_SPACES = re.compile(r"(?<=\d)[' \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}](?=\d{3}(\D|$))")  # between thousands
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?(,\d+)?([eE][+-]?\d+)?")
_CLOCK = re.compile(r"(?P<parts>\d{1,3}(:[0-5]\d){1,2}([.]\d+)?)( ?(?P<half>[ap])\.?m\.?)?", re.IGNORECASE)  # 9:05 pm
_NOTATIONS = ("plain", "signs", "thousands", "decimal comma", "clock")
_WITH_UNIT = re.compile(r"[+-]?\d([\d.,]*\d)? ?(?P<unit>([^\W\d_]|[°'\"/²³])+)")  # such as 18.3 °C or 1,200 km/h
_UNIT = ", unit "  # between a notation and the unit


def find_notation(raw: Words, *, forced: bool = False) -> str | None:
    """How the numbers in a text column are written, and their unit; None if it does not contain numbers.

    Up to a tenth of the cells may be typos. But a column with few values, in which the words occur several times, is a
    code such as 0, 1, 2, 3+.
    """
    counts = dict(zip(raw.words, raw.counts().tolist(), strict=True))
    words = [word for word in raw.words if word.lower() not in GAPS]
    total = sum(counts[word] for word in words)
    if not words:
        return None
    best, fewest = None, total
    unit = _find_unit(words)
    with_unit = [notation + _UNIT + unit for notation in ("thousands", "decimal comma") if unit]
    for notation in (*_NOTATIONS, *with_unit):
        if sum(_to_number(word, notation) is not None for word in words[:100]) * 2 < len(words[:100]):
            continue
        bad = [word for word in words if _to_number(word, notation) is None]
        n_bad = sum(counts[word] for word in bad)
        is_code = bool(bad) and len(words) <= _FEW_VALUES and all(counts[word] > 2 for word in bad)
        if n_bad < fewest and (forced or not is_code):
            best, fewest = notation, n_bad
    return best if forced or 10 * fewest <= total else None


def _find_unit(words: list[str]) -> str:
    """What follows the numbers in most of the cells; '' if they are not numbers with a unit."""
    units = Counter(match["unit"] for word in words[:100] if (match := _WITH_UNIT.fullmatch(word)))
    unit, n = units.most_common(1)[0] if units else ("", 0)
    return unit if 2 * n > len(words[:100]) else ""


def _to_number(word: str, notation: str) -> float | None:
    if notation == "clock":
        return _read_clock(word)
    notation, _, unit = notation.partition(_UNIT)
    word = word.removesuffix(unit).rstrip()
    if not word:
        return None
    if notation != "plain":
        sign = "-" if word[0] in "-\N{MINUS SIGN}" else ""
        word = sign + _SPACES.sub("", word.lstrip("+-\N{MINUS SIGN}").strip(_SIGNS))
    if notation == "thousands" and _THOUSANDS.fullmatch(word):
        word = word.replace(",", "")
    elif notation == "decimal comma" and _DECIMAL_COMMA.fullmatch(word):
        word = word.replace(".", "").replace(",", ".")
    elif notation == "decimal comma":
        return None
    return float(word) if is_number(word) else None


def _read_clock(word: str) -> float | None:
    """A time of day or a duration as a number of its last part: 1:02:03 in seconds, 9:05 in minutes."""
    match = _CLOCK.fullmatch(word)
    if match is None:
        return float(word) if is_number(word) else None
    parts = [float(part) for part in match["parts"].split(":")]
    if match["half"]:
        parts[0] = parts[0] % 12 + (12 if match["half"].lower() == "p" else 0)
    return float(sum(part * 60**k for k, part in enumerate(reversed(parts))))


def find_date_order(raw: Words) -> tuple[str | None, bool]:
    """The order of day, month and year in a text column of dates (None: no dates), and whether that is a guess."""
    words = [word for word in raw.words if word.lower() not in GAPS]
    counts = dict(zip(raw.words, raw.counts().tolist(), strict=True))
    total = sum(counts[word] for word in words)
    n_read: dict[str, int] = {}
    for order in _DATES:
        if sum(_to_day(word, order) is not None for word in words[:100]) * 2 >= len(words[:100]):
            n_read[order] = sum(counts[word] for word in words if _to_day(word, order) is not None)
    best = max(n_read, key=lambda order: n_read[order], default=None)
    if best is None or not total or 10 * n_read[best] < 9 * total:
        return None, False
    is_guess = n_read.get("dmy") == n_read.get("mdy") and best != "ymd" and "." not in words[0]
    return ("mdy" if is_guess else best), is_guess


def _to_day(word: str, order: str) -> float | None:
    """Days since 1970, with the time of day as a fraction."""
    match = next((match for form in _DATES[order] if (match := form.fullmatch(word))), None)
    if match is None:
        return None
    parts = match.groupdict()
    year = int(parts["y"])
    if len(parts["y"]) == 2:
        year += 2000 if year < 70 else 1900
    month = _MONTHS.index(parts["name"].lower()) + 1 if parts.get("name") else int(parts["m"])
    try:
        days = date(year, month, int(parts["d"] or 1)).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    hour = int(parts["hour"] or 0)
    if parts["half"]:
        hour = hour % 12 + (12 if parts["half"].lower() == "p" else 0)
    minutes = 60 * hour + int(parts["minute"] or 0) + float((parts["second"] or "0").replace(",", ".")) / 60
    if parts["zone"]:
        minutes -= 60 * int(parts["zone"]) + int(parts["zone"][0] + parts["zone_minute"])
    return days + minutes / 1440


def read_numbers(raw: Raw, notation: str) -> tuple[Floats, NDArray[np.bool_]]:
    """[N] numbers, NaN if missing; and which cells are neither missing nor finite numbers, whose number is also NaN."""
    if isinstance(raw, Words):
        numbers, bad = _read_words(raw, notation, _to_number)
    else:
        numbers = raw.astype(np.float64)
        bad = np.zeros(len(numbers), dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):
        huge = np.isinf(numbers.astype(np.float32))
    return np.where(huge, np.nan, numbers), bad | huge


def read_days(raw: Raw, order: str) -> tuple[Floats, NDArray[np.bool_]]:
    """[N] days since 1970, NaN if missing, and which cells are neither missing nor dates."""
    if isinstance(raw, Words):
        return _read_words(raw, order, _to_day)
    days = raw.astype("datetime64[us]").astype(np.float64) / 86_400_000_000
    return np.where(np.isnat(raw), np.nan, days), np.zeros(len(days), dtype=bool)


def _read_words(raw: Words, form: str, read: Callable[[str, str], float | None]) -> tuple[Floats, NDArray[np.bool_]]:
    values = [np.nan if word.lower() in GAPS else read(word, form) for word in raw.words]
    bad = np.array([value is None for value in values])
    return raw.take(np.array([np.nan if value is None else value for value in values])), raw.take(bad)
