# ruff: noqa: RUF001 (signs of Unicode are what is tested)
"""What counts as the answer of a response, and when it is the ground truth: a table."""

import pytest

from pat.rl import answers
from pat.rl.reward import right

# truth, responses that are right, responses that are not
TABLE = [
    # whole and decimal numbers
    ("288", ["The answer is 288.", "**288**", "288\n\n", "$288$", r"\boxed{288}", "= 288!", "288.0", "2.88e2"], []),
    ("288", [], ["", "28", "2880", "first 288, no: 3", "H288", "288x", "288^2", "2·288x", "1288", "-288"]),
    ("7", ["so 3 + 4 = 7", "3 and 4 make 7", "- 7", "* 7", "is *7*", "Answer:7", "7th", "7km", "7 - that is it"], []),
    ("7", [], ["3+4", "3 + 4", r"\boxed{3+4}", "14/2x", "10-7", "4 * 7", "4*7", r"4 \times 7", "(1, 7)", "0,7", "x7"]),
    ("-5", [r"\boxed{-5}", "x = -5", "−5", "= − 5", "–5", "is -5", r"\boxed{- 5}"], ["5", "10-5", "- 5", "0 - 5"]),
    ("−5", ["-5"], ["5"]),
    (
        "1234.5",
        ["It costs $1,234.50!", "1234.5", r"\$1{,}234.5", r"1\,234.5", "1 234.5"],
        ["1,2345", "234.5", "1234,5"],
    ),
    ("1,234", ["1234", "1,234"], ["1.234", "234", "1,23"]),
    ("1e3", ["1000", "1,000", "1e3", "1E+3", r"1 \times 10^3", "1×10^{3}", "1*10^3"], ["3", "13", "1e2", "8.15"]),
    ("0.0015", ["1.5e-3", r"1.5\cdot 10^{-3}", ".0015", "0.15%"], ["0.001", "1.5", "15"]),
    ("0.25", [".25", "1/4", r"\frac14", "25%", "¼"], ["25", "0,25", "4"]),
    (
        "2",
        [],
        ["1,2", "1.2", "10:2", "2025-01-2", "v1.2", r"\frac{1}{2}", r"\sqrt{2}", r"\sqrt2", "x_2", "x^{2}", "x²"],
    ),
    ("12", ["1 dozen, or 12", "12,", "12, of course"], ["1,2", "1 2", "1, 2"]),
    # fractions
    (
        "3/4",
        ["3/4", "0.75", r"\frac{3}{4}", r"\dfrac34", "75%", "6/8", "¾"],
        ["1/4", "4", "3", "3/4/2", "-3/4", "3/4x"],
    ),
    (r"\frac{1}{2}", ["1/2", "0.5", r"$\frac{1}{2}$", r"\tfrac12", "½"], ["2", "1", "1/3", r"-\frac{1}{2}"]),
    (r"-\frac{1}{2}", ["-1/2", "-0.5", r"\boxed{-\frac12}"], ["1/2", "2"]),
    (r"0.1\overline{6}", ["1/6", r"0.1\overline{6}"], ["0.16", "0.1", "1.6"]),
    ("3.5", ["3 1/2", "3½", r"3\frac{1}{2}", "7/2"], ["1/2", "31/2", "3 and 1/2"]),
    ("0", ["0", "-0.0"], ["1/0", "0/0", "1e-2000", "x"]),
    # percent, units, money
    ("50%", ["50%", "50", "0.5", r"50\%", "50 percent"], ["5", "0.05", "5000%"]),
    (r"5\%", ["5%", "0.05"], ["500%", "0.5"]),
    ("12 cm", ["12", "12 cm", r"\boxed{12\text{ cm}}", "It is 12 cm long."], ["12 m", r"\boxed{12 km}", "13 cm"]),
    (r"90^\circ", ["90", "90°", r"90^{\circ}"], ["9", "0"]),
    (r"\$18.90", ["18.9", "$18.90"], ["18", "90"]),
    ("10 AM", ["10 AM", "10 am."], ["10 PM", "11 AM"]),
    # the box counts, then what comes last; thoughts do not
    (
        "4",
        [r"\boxed{4} after 3 steps", r"\boxed{3}, no: \boxed{4}", r"\boxed{x = 4}"],
        [r"\boxed{3} and 4", r"\boxed{}4"],
    ),
    ("4", ["<think>it is 3</think> 4"], ["<think>4</think> none"]),
    # words
    (
        "yes",
        ["Yes", "The answer is yes.", "Answer: **Yes**!", r"\boxed{\text{yes}}", "Well.\nYes."],
        ["no", "yes and no"],
    ),
    ("no", ["no", "No."], ["on", "The answer is unknown", "yes"]),
    ("prime", ["The answer is prime"], ["The answer is not prime", "It is not prime"]),
    ("New York", ["new  york", r"\textbf{New York}"], ["York", "New Jersey"]),
    ("(B)", ["B", "(b)", "The answer is (B).", r"\boxed{\text{(B)}}", "Answer: B"], ["A", "AB", "(A) or (B)"]),
    (r"\text{Evelyn}", ["Evelyn", r"\boxed{\text{Evelyn}}"], ["evelyns"]),
    ("10:30", ["10:30", "The answer is 10:30."], ["30", "1:3", "10:31"]),
    ("2025-01-02", ["2025-01-02"], ["2022", "2025-01-03"]),
    ("über", ["Über"], ["uber"]),
    # expressions
    ("2x+3", ["2x+3", "3+2x", "f(x) = 2x + 3", r"\boxed{2x+3}", "The answer is $2x+3$.", "So: 2*x+3"], []),
    ("2x+3", [], ["x+3", "3", "2y+3", "2x-3", "23", "2x + 3 = y", "(2x+3)^2", "because of 2x+3 cats"]),
    (
        r"\frac{\sqrt{3}}{2}",
        [r"\frac{\sqrt3}{2}", "√3/2", "sqrt(3)/2", r"$\sqrt{\frac{3}{4}}$"],
        ["2", "3/2", r"\sqrt{3}"],
    ),
    (r"2\sqrt{3}", [r"\sqrt{12}", r"\boxed{2\sqrt 3}"], [r"3\sqrt{2}", "12", "3"]),
    (r"\frac{\pi}{2}", ["π/2", "pi/2", r"\frac12\pi"], ["2", r"\pi", "1.57"]),
    ("x^2+2x+1", ["(x+1)^2", "x**2+2*x+1", "x²+2x+1"], ["x^2+1", "(x-1)^2"]),
    ("(1,2)", ["(1, 2)", r"$\left(1,2\right)$"], ["(2,1)", "[1,2]", "2"]),
    ("1,-2", ["-2, 1", "1, -2"], ["1", "-2", "1,2"]),
    (r"x \le 5", ["x <= 5", "x≤5", r"5 \ge x"], ["x<5", "x>=5", "5"]),
    (r"x=5 \text{ or } x=-3", ["-3, 5", r"\boxed{5, -3}"], ["5", "3, 5"]),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"], ["(1,2)", "2"]),
    ("10^{10}", ["10000000000", "10^10", r"\boxed{10{,}000{,}000{,}000}"], ["10", "1010", "10^9"]),
    ("n!", ["n!"], ["n", "m!"]),
    ("5 and 7", ["7 and 5", "5, 7"], ["7", "5", "5 and 8"]),
    ("p - q", ["p-q"], ["q-p", "p", "pq"]),
]
RIGHT = [(truth, response) for truth, good, _ in TABLE for response in good]
WRONG = [(truth, response) for truth, _, bad in TABLE for response in bad]


@pytest.mark.parametrize(("truth", "response"), RIGHT)
def test_right(truth, response):
    assert right(answers.truth(truth), response)


@pytest.mark.parametrize(("truth", "response"), WRONG)
def test_wrong(truth, response):
    assert not right(answers.truth(truth), response)
