"""What a response answers, and whether that is the ground truth: a number, words, or an expression.

* A number (`1,234.5`, `-3/4`, `\\frac{1}{2}`, `1e3`, `50%`, `12 cm`) is met by the same number as a number, not by a
  sum that makes it: a model would learn to repeat the question.
* Words (`yes`, `New York`, `(B)`) are met by the same words.
* Anything else is LaTeX, met by an expression that is equal to it (`pat.rl.algebra`).

The answer is what the last `\\boxed{}` holds; without one the last number, or what stands behind the last "answer is"
or "answer:", or the last formula of the last line, or that line.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 300  # characters of an expression that is worth reading

# Signs of Unicode: minus, en dash and their like; times, divided by; spaces of a fixed width; fraction slash.
_SYMBOLS = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")
    | {"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": r"\div ", "\u2044": "/"}
    | {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "√": r"\sqrt "}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_FUNCTIONS = ("sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp", "arcsin", "arccos", "arctan")
_REWRITTEN = [
    (r"\\(?:left|right|displaystyle|!)(?![A-Za-z])", ""),
    (r"\{,\}", ","),  # 1{,}234
    (r"\\[,;: ]|~|\\q?quad", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r"\1"),
    (r"\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?", "°"),
    (r"\\([%#&])", r"\1"),
    (r"(?<=[\w)])\*\*(?=[\w(])", "^"),  # Python's power
    (r"\*\*|`|(?<!\w)__|__(?!\w)", ""),  # Markdown
    (r"\\\$|\$|\\[()\[\]]", " "),  # currency, and where formulas begin and end
]

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?!\d)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE](?P<e>[-+]?\d+)| ?(?:\\times|\\cdot|[x*]) ?10\^\{?(?P<ten>[-+]?\d+)\}?)"
_FRACTION = rf"(?:(?P<mixed>\d+) +(?=\d+ ?/))?(?P<over>{_WHOLE}) ?/ ?(?P<under>{_WHOLE})(?!\.\d)"
_VALUE = rf"{_FRACTION}|(?P<decimal>{_DECIMAL}){_POWER}?"
_NUMBER = re.compile(rf"(?<![\d.])(?:{_VALUE})")
_ALONE = re.compile(rf"(?:[A-Za-z]\w* ?= ?)?(?P<sign>[-+]?) *(?:{_VALUE})(?P<rest>[^\d=]*)")
_UNIT = re.compile(r" *(?P<percent>%?) *(?P<unit>(?:[^\W\d_]+|°)(?:[ /]+[^\W\d_]+)*)?")

# What stands before or behind a number that is part of something larger.
_OPERATOR = re.compile(r"[\w)\]}°%](?P<before> *)(?:[-+*/^]|\\times|\\cdot|\\div)(?P<behind> *)$")
_INSIDE = re.compile(r"[\w)\]}\\^]$|[\d][:,.]$|[\w)}]/$|[{^_] *$|[(\[][-+\d\s,./]*, *$|\\(?:sqrt|frac|pi) *$")
_GOES_ON = re.compile(
    r"[A-Za-z](?<![mgLlshAVWNJKC])(?![A-Za-z])| [xyz](?![A-Za-z])| ?[\^(_]|,\d|\.\d|:\d"
    r"| ?(?:[-+*/]|\\times|\\cdot|\\div) ?(?:[A-Za-z](?![A-Za-z])|\(|\\)"
    r"| ?\\(?!end|square|blacksquare|checkmark|newline|times|cdot|div)[A-Za-z]"
)
_MARKER = re.compile(r"\b(?:answer|result|solution)s?\b\W{0,3}(?:\bis\b|\bare\b|:|=)\s*:?", re.I)
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)


@dataclass(frozen=True)
class Number:
    value: Fraction
    percent: bool = False
    unit: str = ""

    def meets(self, truth: Number) -> bool:
        """Whether it is the number that was meant; a unit counts where both have one."""
        if self.unit and truth.unit and not f"{self.unit} ".startswith(f"{truth.unit} "):
            return False
        scale = 100 if self.percent and not truth.percent else 1
        other = 100 if truth.percent and not self.percent else 1
        return self.value == truth.value or self.value * other == truth.value * scale


@dataclass(frozen=True)
class Truth:
    """A ground truth: ``number``, or ``words``, or neither and then ``text`` is an expression."""

    text: str
    number: Number | None
    words: str | None


def truth(value: str | int | float) -> Truth:
    """What ``value`` means. Raises ValueError if it is empty or prose with formulas, which nothing could meet."""
    text = str(value).strip()
    inside = boxed(text)
    text = text if inside is None else inside
    if not text:
        raise ValueError("it is empty")
    if found := number(text):
        return Truth(text, found, None)
    said = words(text)
    if _is_words(said) and not re.search(r"\b\w!", text):
        return Truth(text, None, said)
    expression = latex(text)
    named = re.sub(r"\\[A-Za-z]+ *\{[A-Za-z ,.]*\}", "", expression)  # \begin{pmatrix}, \text{ or }
    runs = set(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", named)) - {"and"}  # xyz is a product, a sentence is none
    if len(runs) > 1 or any(len(run) > 3 for run in runs) or len(expression) > LONGEST:
        raise ValueError("it is neither a number, nor words, nor an expression")
    return Truth(text, None, None)


def number(text: str) -> Number | None:
    """The number that ``text`` is, perhaps with a unit or as `x = 5`; None if it is anything else."""
    if len(text) > LONGEST:
        return None
    match = _ALONE.fullmatch(plain(text).strip().rstrip(".").strip())
    unit = match and _UNIT.fullmatch(match["rest"].rstrip(" ."))
    if not unit or _GOES_ON.match(match["rest"]):
        return None
    return _made(match, match["sign"] == "-", unit)


def last_number(text: str) -> Number | None:
    """The last number in ``text``; None if there is none, or if it is part of a list, a date, a sum or a formula."""
    text = plain(text)
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    match = found[-1]
    before, after = text[: match.start()].rpartition("\n")[2][-LONGEST:], text[match.end() :]
    negative = False
    operator = _OPERATOR.search(before)
    if operator and bool(operator["before"]) == bool(operator["behind"]):
        return None
    if sign := re.search(r"[-+] *$", before):
        before = before[: sign.start()]
        bullet = not before.strip() and sign.group().endswith(" ")
        negative = sign.group()[0] == "-" and not bullet
    if _INSIDE.search(before) or _GOES_ON.match(after):
        return None
    return _made(match, negative, _UNIT.match(after))


def final(text: str) -> str:
    """What ``text`` says in the end, where that is not a number."""
    if (inside := boxed(text)) is not None:
        return inside
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    marked = list(_MARKER.finditer(text))
    rest = text[marked[-1].end() :].strip().splitlines() if marked else []
    line = (re.split(r"\.(?=\s|$)", rest[0])[0] if rest else lines[-1].rpartition(": ")[2])[-2 * LONGEST :]
    formulas = list(_FORMULA.finditer(line))
    return next(filter(None, formulas[-1].groups())) if formulas else line


def boxed(text: str) -> str | None:
    """What the last `\\boxed{}` of ``text`` holds, None without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place].strip()
    return None


def words(text: str) -> str:
    """``text`` as words to compare: without case, markup, and the marks around it."""
    return " ".join(plain(text).casefold().split()).strip(" .,;:!?()[]\"'*“”")


def latex(text: str) -> str:
    """``text`` as LaTeX, if it was written with Unicode or as in a programming language."""
    text = _unicode(text)
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(])", "^", text)
    for compared, written in (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne ")):
        text = text.replace(compared, written)
    text = re.sub(r"\\[()\[\]]|\$|`|\*\*", " ", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s+(\w)", r"\\sqrt{\1}", text)
    return text.replace("*", r"\cdot ").strip().rstrip(".").strip()


def plain(text: str) -> str:
    """``text`` with one form for each number: LaTeX's fractions and spaces, Unicode's signs, Markdown's marks."""
    text = _unicode(text)
    for pattern, written in _REWRITTEN:
        text = re.sub(pattern, written, text)
    text = re.sub(r"(\d+)\.(\d{,20})\\overline\s*\{(\d{1,20})\}", _repeating, text)
    return re.sub(
        r"(\d?) ?\\frac\s*\{\s*(-?[\d,]+)\s*\}\s*\{\s*([\d,]+)\s*\}",
        lambda match: (match[1] and match[1] + " ") + f"{match[2]}/{match[3]}",
        text,
    )


def _repeating(match: re.Match) -> str:
    """A decimal whose last digits repeat, as a fraction."""
    whole, fixed, repeated = match.groups()
    scale, nines = 10 ** len(fixed), 10 ** len(repeated) - 1
    return f"{int(whole + fixed) * nines + int(repeated)}/{scale * nines}"


def _unicode(text: str) -> str:
    vulgar = [c for c in set(text) if unicodedata.decomposition(c).startswith("<fraction>")]
    for character in vulgar:
        text = re.sub(rf"(\d?){character}", rf"\1 {unicodedata.normalize('NFKC', character)}", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    return text.translate(_SYMBOLS)


def _made(match: re.Match, negative: bool, unit: re.Match) -> Number | None:
    if len(match.group()) > LONGEST:
        return None

    def whole(text: str) -> Fraction:
        return Fraction(text.replace(",", "").replace(" ", ""))

    if match["over"]:
        if not whole(match["under"]):
            return None
        value = whole(match["mixed"] or "0") + whole(match["over"]) / whole(match["under"])
    else:
        exponent = int(match["e"] or match["ten"] or 0)
        if abs(exponent) > 1000:
            return None
        value = whole(match["decimal"]) * Fraction(10) ** exponent
    return Number(
        -value if negative else value, bool(unit and unit["percent"]), words(unit["unit"] or "") if unit else ""
    )


def _is_words(said: str) -> bool:
    """Words, a letter, or digits apart by marks that no number has (10:30, 2025-01-02)."""
    if re.fullmatch(r"\d+(?:[-/:.]\d+)+", said):
        return True
    if re.search(r"[\\^_=<>{}+*/|]|\d[a-z]", said) or not said:
        return False
    runs = re.findall(r"[^\W\d_]+", said)
    known = set(runs) & {*_FUNCTIONS} or not set(runs) - {"and", "or"}
    return not known and (len(said) == 1 or any(len(run) > 1 for run in runs))
