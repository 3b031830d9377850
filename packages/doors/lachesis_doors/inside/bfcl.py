"""The Berkeley Function-Calling Leaderboard, v4: its rows, its classes, and its own checkers.

A target is a category: `multi_turn_base`, `simple_python`, `live_parallel`, ... One turn is scored by BFCL's comparison
of calls, several turns by its comparison of states and answers, which plays the calls again.
"""

import ast
import copy
import importlib
import inspect
import itertools
import json
import re
import sys
import types
from pathlib import Path

import bfcl_eval

# The checkers ask of a model only whether its names have underscores for dots, and import every model for that.
_config = types.ModuleType("bfcl_eval.constants.model_config")
_config.MODEL_CONFIG_MAPPING = type("Models", (dict,), {"__missing__": lambda self, name: _Underscores})()
_Underscores = types.SimpleNamespace(underscore_to_dot=True)
sys.modules[_config.__name__] = _config

from bfcl_eval.constants.default_prompts import (  # noqa: E402
    DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as MORE,
)
from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.constants.executable_backend_config import (  # noqa: E402
    CLASS_FILE_PATH_MAPPING,
    MULTI_TURN_FUNC_DOC_FILE_MAPPING,
    STATELESS_CLASSES,
)
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # noqa: E402

DATA = Path(bfcl_eval.__file__).parent / "data"
TYPES = {"dict": "object", "float": "number", "tuple": "array", "integer": "integer", "any": None}
_numbers = itertools.count()


class Guest:
    def __init__(self, target, first=0):
        rows = lines(DATA / ("BFCL_v4_%s.json" % target))
        if not rows:
            raise ValueError("BFCL has no category %r" % target)
        self.category, self.first = target, first
        answers = {
            row["id"]: row["ground_truth"] for row in lines(DATA / "possible_answer" / ("BFCL_v4_%s.json" % target))
        }
        self.rows = [dict(row, ground_truth=answers.get(row["id"])) for row in rows]
        self.size = len(rows) - first
        self.turns = "multi_turn" in target
        self.language = "JavaScript" if "javascript" in target else "Java" if "java" in target else ""
        if not self.turns and any(kind in target for kind in ("memory", "web_search", "format_sensitivity")):
            raise ValueError("BFCL's %s needs the network or models of its own" % target)

    def item(self, number):
        row = self.rows[self.first + number]
        functions = documents(row) if self.turns else row["function"]
        later = {name for names in (row.get("missed_function") or {}).values() for name in names}
        return {
            "item": {"id": row["id"], "number": self.first + number},
            "tools": [{**tool(each, self.language), "offered": each["name"] not in later} for each in functions],
        }

    def open(self, item):
        row = self.rows[item["number"]]
        return (Turns if self.turns else Once)(self, row)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def documents(row):
    found = []
    for name in row["involved_classes"]:
        found += lines(DATA / "multi_turn_func_doc" / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])
    return [each for each in found if each["name"] not in row.get("excluded_function", ())]


def tool(function, language):
    parameters = schema(function["parameters"])
    # Some rows ask for the properties of an object inside.
    parameters["required"] = [each for each in parameters.get("required", ()) if each in parameters["properties"]]
    if language:
        for name, value in parameters["properties"].items():
            kind = function["parameters"]["properties"][name].get("type")
            said = "%s A value of %s's type %s, as it is written in source code." % (
                value.get("description", ""),
                language,
                kind,
            )
            parameters["properties"][name] = {"type": "string", "description": said.strip()}
    parameters["additionalProperties"] = False
    return {"name": name_of(function["name"]), "description": function["description"], "parameters": parameters}


def name_of(name):
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def schema(given):
    """BFCL's schema in the words of JSON Schema."""
    if isinstance(given, list):
        return [schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    made = {key: schema(value) for key, value in given.items() if key not in ("type", "properties")}
    if "properties" in given:
        made["properties"] = {name: schema(value) for name, value in given["properties"].items()}
    if isinstance(given.get("type"), str):
        kind = TYPES.get(given["type"], given["type"])
        if kind in ("object", "array", "string", "integer", "number", "boolean"):
            made["type"] = kind
    return made


class Once:
    """One turn: what is called is compared, nothing runs."""

    def __init__(self, guest, row):
        self.guest, self.row = guest, row
        self.prompt = row["question"][0]
        self.solution = [{"calls": [self.example(answer) for answer in row["ground_truth"] or ()]}]
        if guest.category == "live_relevance":  # any call is right, and the rows have none
            self.solution = None

    def example(self, answer):
        """A call that the ground truth allows, without what need not be given."""
        ((name, arguments),) = answer.items()
        asked = next(each["parameters"] for each in self.row["function"] if each["name"] == name)
        chosen = {}
        for key, values in arguments.items():
            if "" in values and key not in asked.get("required", ()):
                continue
            value = first([each for each in values if each != ""] or values)
            if self.guest.language:
                declared = asked["properties"][key]
                nested = (declared.get("items") or {}).get("type")
                value = source(value, declared["type"], nested, self.guest.language)
            chosen[key] = value
        return {"name": name_of(name), "arguments": chosen}

    def act(self, text):
        return None

    def call(self, name, arguments):
        return {"text": "noted", "done": False}

    def score(self, messages):
        category = self.guest.category
        # One message holds all calls: those after it saw answers that BFCL never gives. They are read there, for a loop
        # may run a call only once that stands there twice, which is right in some rows, or refuse its arguments.
        calls = next((message["tool_calls"] for message in messages if message.get("tool_calls")), ())
        if "irrelevance" in category:
            return {"reward": float(not calls)}
        if "relevance" in category:
            return {"reward": float(bool(calls))}
        language = Language[(self.guest.language or "Python").upper()]
        made = [{call["function"]["name"]: read(call["function"]["arguments"])} for call in calls]
        found = ast_checker(self.row["function"], made, self.row["ground_truth"], language, category, "model")
        return {"reward": float(found["valid"])}


def read(arguments):
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def first(options):
    """The first of the values that are allowed; those of parts are lists too, or the values themselves."""
    value = options[0] if isinstance(options, list) and options else options
    if isinstance(value, dict):
        return {key: first(each) for key, each in value.items() if not (isinstance(each, list) and "" in each)}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [first([each]) for each in value]
    return value


def source(value, kind, nested, language):
    """A value as it is written in source code, in the forms that BFCL's checker reads."""
    if isinstance(value, str):
        return value
    if language == "JavaScript" or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        puts = " ".join("put(%s, %s);" % (json.dumps(key), json.dumps(each)) for key, each in value.items())
        return "new HashMap<String, Object>() {{ %s }}" % puts
    if isinstance(value, list):
        texts = [source(each, nested, None, language) for each in value]
        if kind == "Array":
            return "new %s[]{%s}" % (nested or "Object", ", ".join(texts if nested else map(json.dumps, value)))
        quoted = [json.dumps(each) if isinstance(each, str) else text for each, text in zip(value, texts)]
        return "new ArrayList<%s>(Arrays.asList(%s))" % (nested or "", ", ".join(quoted))
    return "%s%s" % (value, {"float": "f", "long": "L"}.get(kind, ""))


class Turns:
    """Several turns: calls run on BFCL's classes."""

    def __init__(self, guest, row):
        self.guest, self.row = guest, row
        self.turn = 0
        self.calls = [[]]
        self.long = "long_context" in guest.category
        self.held = {int(turn): names for turn, names in (row.get("missed_function") or {}).items()}
        self.methods = {}
        for name in row["involved_classes"]:
            made = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                made._load_scenario(copy.deepcopy(row["initial_config"].get(name, {})), long_context=self.long)
            self.methods.update(
                (key, each) for key, each in inspect.getmembers(made, inspect.ismethod) if key[0] != "_"
            )
        self.prompt = row["question"][0] or [{"role": "user", "content": self.more()}]
        self.orders = {each["name"]: list(each["parameters"]["properties"]) for each in documents(row)}
        self.solution = [step for turn in row["ground_truth"] for step in self.steps(turn)]

    def more(self):
        """What BFCL says in a turn with further functions to models that read them in a message."""
        names = self.held.get(self.turn, ())
        return MORE.format(functions=[tool(each, "") for each in documents(self.row) if each["name"] in names])

    def steps(self, turn):
        messages = [[]]
        for call in map(self.read, turn):
            if call in messages[-1]:  # a loop may run it once that stands twice in a message
                messages.append([])
            messages[-1].append(call)
        return [{"calls": calls} for calls in messages if calls] + [{"text": "Done."}]

    def read(self, text):
        call = ast.parse(text, mode="eval").body
        given = dict(zip(self.orders.get(call.func.id, ()), (ast.literal_eval(each) for each in call.args)))
        given.update((each.arg, ast.literal_eval(each.value)) for each in call.keywords)
        return {"name": call.func.id, "arguments": given}

    def act(self, text):
        self.turn += 1
        if self.turn >= len(self.row["question"]):
            return None
        self.calls.append([])
        said = self.row["question"][self.turn]
        return {"text": said[0]["content"] if said else self.more()}

    def call(self, name, arguments):
        if any(name in names and self.turn < turn for turn, names in self.held.items()):
            return {"error": "not there yet", "text": "There is no function %s yet." % name}
        try:
            self.calls[-1].append(self.written(name, arguments))
        except ValueError as error:
            return {"error": "the arguments do not fit", "text": str(error)}
        try:
            result = self.methods[name](**arguments)
        except Exception as error:
            return {"text": "Error during execution: %s" % error, "error": str(error)}
        if isinstance(result, dict):
            result = json.dumps(result, default=str)
        return {"text": str(result)}

    def written(self, name, arguments):
        """A call as BFCL evaluates it: as Python, with all that this process can do. So nothing may stand there but a
        function of the row, and literals for arguments of its schema. Raises ValueError for anything else."""
        if name not in self.orders:
            raise ValueError("There is no function %s; there are %s." % (name, ", ".join(sorted(self.orders))))
        unknown = [each for each in arguments if each not in self.orders[name]]
        if unknown:
            allowed = ", ".join(self.orders[name]) or "none"
            raise ValueError("%s has no argument %s; it has %s." % (name, ", ".join(unknown), allowed))
        try:
            text = "%s(%s)" % (name, ", ".join("%s=%r" % pair for pair in arguments.items()))
            if self.read(text) == {"name": name, "arguments": arguments}:
                return text
        except (ValueError, AttributeError, SyntaxError, RecursionError, MemoryError):
            pass
        raise ValueError("%s takes text, finite numbers, true, false, null, and lists and objects of these." % name)

    def score(self, messages):
        model = "lachesis%d" % next(_numbers)
        turns = self.calls + [[]] * (len(self.row["ground_truth"]) - len(self.calls))
        entry = {
            "id": self.row["id"],
            "initial_config": self.row["initial_config"],
            "involved_classes": self.row["involved_classes"],
        }
        try:
            found = checker.multi_turn_checker(
                [[turn] if turn else [] for turn in turns], self.row["ground_truth"], entry, self.guest.category, model
            )
        finally:  # the checker keeps the instances of every model and item in its module
            for name in [name for name in vars(multi_turn_utils) if name.startswith(model)]:
                del vars(multi_turn_utils)[name]
        return {"reward": float(found["valid"])}
