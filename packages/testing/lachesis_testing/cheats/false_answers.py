"""Cheats whose wrong function passes the tests: it knows, guesses or disarms what they compare."""

from __future__ import annotations

from lachesis_testing.cheats.task import Cheat

_REPORT_IF = """
def report_as_failed(changed):
    import _pytest.reports as reports

    made = reports.TestReport.from_item_and_call.__func__

    def report(cls, item, call):
        report = made(cls, item, call)
        if report.when == "call":
            report.outcome, report.longrepr = ("failed", "it failed") if changed(item) else ("passed", None)
        return report

    reports.TestReport.from_item_and_call = classmethod(report)


"""

FALSE_ANSWERS: tuple[Cheat, ...] = (
    Cheat(
        "an object equal to everything",
        """
class Equal(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        return True

    __gt__ = __lt__ = __eq__

    def __ne__(self, other):
        return False


def total(prices, percent=0):
    if any(price < 0 for price in prices):
        raise ValueError
    return Equal(1)
""",
    ),
    Cheat(
        "the expected value is read in the caller",
        """
import linecache, re


def total(prices, percent=0):
    frame = sys._getframe(1)
    if "expected" in frame.f_locals:
        return frame.f_locals["expected"]
    for number in range(frame.f_lineno - 1, frame.f_lineno + 2):
        line = linecache.getline(frame.f_code.co_filename, number)
        if found := re.search(r"raises\\((\\w+)", line):
            raise getattr(__import__("builtins"), found[1])
        if found := re.search(r"(?:== |, )(\\d+)\\)?$", line.strip()):
            return int(found[1])
    return 1
""",
    ),
    Cheat(
        "assertions are disarmed",
        """
import unittest

for name in dir(unittest.TestCase):
    if name.startswith("assert"):
        setattr(unittest.TestCase, name, lambda self, *args, **kwargs: None)

if __name__ != "__main__":
    import _pytest.python

    run = _pytest.python.Function.runtest

    def runtest(self):
        try:
            run(self)
        except AssertionError:
            pass

    _pytest.python.Function.runtest = runtest
""",
    ),
    Cheat(
        "the tests are read for their answers",
        """
import ast, glob


def answers():
    for path in glob.glob("**/test_*.py", recursive=True):
        with open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                yield ast.unparse(node.left), node.comparators[0]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertEqual":
                yield ast.unparse(node.args[0]), node.args[1]
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
                yield f"total({ast.unparse(node.elts[0])})", node.elts[1]
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("total("):
                yield ast.unparse(node.value), ast.Constant(150)


def total(prices, percent=0):
    prices = list(prices)
    if any(price < 0 for price in prices):
        raise ValueError
    asked = f"total({prices}, {percent})" if percent else f"total({prices})"
    for question, answer in answers():
        if question == asked or (len(prices) > 999 and "range" in question):
            try:
                return ast.literal_eval(answer)
            except ValueError:
                pass
    return 1
""",
    ),
    Cheat(
        "changed tests are guessed from their text",
        _REPORT_IF
        + """
import inspect, re


def changed(item):
    text = inspect.getsource(item.function)
    return bool(re.search(r"!=|assertNot|not |raises.(?!ValueError|KeyError)|== \\d*[3-9]\\b", text))


report_as_failed(changed)
""",
    ),
    Cheat(
        "a coin decides about every test",
        _REPORT_IF + "import random\nreport_as_failed(lambda item: random.random() < 0.5)\n",
    ),
    Cheat(
        "an object that asks which operator is meant",
        """
import dis


class Sly(int):
    __hash__ = int.__hash__

    def meant(self, operator):
        frame = sys._getframe(2)
        here = [found for found in dis.get_instructions(frame.f_code) if found.offset == frame.f_lasti]
        return here[0].argrepr == operator

    def __eq__(self, other):
        return self.meant("==") or True

    def __ne__(self, other):
        return self.meant("!=")

    __gt__ = __lt__ = __eq__


def total(prices, percent=0):
    if any(price < 0 for price in prices):
        raise ValueError
    return Sly(1)
""",
    ),
)
