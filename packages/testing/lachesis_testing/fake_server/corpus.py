"""The training text of the fake tokenizer. Any change to it gives every token another id."""

from __future__ import annotations

from typing import Final

CORPUS: Final = (
    "You are a helpful assistant. You may call one or more functions to assist with the user query.\n",
    "You are provided with function signatures within XML tags. For each function call, return a json object with\n",
    "the function name and its arguments within XML tags. When you know the answer, write it down in one sentence.\n",
    "What is the capital of France? The capital of France is Paris. And of Italy? Rome is the capital of Italy.\n",
    "How many words are there in this line? There are eight words in it, and the longest of them is 'words'.\n",
    "A train leaves the station at 9:15 and arrives at 11:45. How long does the journey take? Two and a half hours.\n",
    "Sarah has 12 apples and gives 5 of them to her brother. How many apples does she have left? She has 7 left.\n",
    "The price of the book is $24.50, and there is a discount of 20%. So the price is 24.50 * 0.8 = $19.60.\n",
    "Let me think about this step by step. First, I need to look at the file. Then I will run the tests again.\n",
    "Wait, that is not right. Let me check the result once more before I answer the question of the user.\n",
    "I will now call the tool to read the file and see what is in there. The command failed with an error.\n",
    "The output of the command shows that the directory is empty, so we have to create the file ourselves.\n",
    "Thank you for your help! That is exactly what I was looking for. Is there anything else that I can do for you?\n",
    "Please write the words of the list in the order of the alphabet, one on a line, into the file 'sorted.txt'.\n",
    "Once upon a time there was a little river that wanted to see the sea. It ran down from the mountain, through\n",
    "the forest and under the old bridge, past the mill and the meadow, until the morning when it could taste salt.\n",
    "In the evening the wind came up from the harbour and moved the lamps along the street. Nobody was outside.\n",
    "The old clock in the kitchen had stopped some years before, but no one in the house had ever noticed it.\n",
    "Three sisters spun, measured and cut the thread; the second of them knew the length of everything.\n",
    "Water boils at 100 degrees Celsius at sea level, and at a lower temperature where the air pressure is lower.\n",
    "Light travels about 300,000 kilometres in one second; sound needs almost three seconds for one kilometre.\n",
    "A model is given a prompt, samples one token after another, and ends its turn with a special token of its own.\n",
    "Every token has a probability, every probability has a logarithm, and the sum of these is what we look at.\n",
    "The reward is 1.0 when the answer is correct and 0.0 when it is not; in between there is nothing to be had.\n",
    '{"type": "function", "function": {"name": "terminal", "description": "Run a shell command in the sandbox.", '
    '"parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "The command to '
    'run"}, "timeout": {"type": "integer", "default": 180}}, "required": ["command"]}}}\n',
    '{"type": "function", "function": {"name": "read_file", "description": "Read a file and return its content.", '
    '"parameters": {"type": "object", "properties": {"path": {"type": "string"}, "offset": {"type": "number"}, '
    '"limit": {"type": "number"}}, "required": ["path"], "additionalProperties": false}}}\n',
    '{"name": "terminal", "arguments": {"command": "ls -la /tmp && cat notes.txt | head -n 20"}}\n',
    '{"name": "write_file", "arguments": {"path": "src/main.py", "content": "print(\'hello world\')\\n"}}\n',
    '{"name": "python", "arguments": {"code": "total = sum(range(10))\\nprint(total)"}}\n',
    '{"name": "web_search", "arguments": {"query": "weather in Paris today", "max_results": 5}}\n',
    '{"name": "get_weather", "arguments": {"city": "London", "unit": "celsius", "days": [1, 2, 3], "wind": true}}\n',
    '{"ok": true, "exit_code": 0, "output": "total 8\\ndrwxr-xr-x 2 user user 4096 Jan 1 12:00 .", "error": null}\n',
    '{"error": "No such file or directory", "status": 404, "items": [], "next": null, "id": "a1b2c3d4"}\n',
    "def fibonacci(number: int) -> int:\n    if number < 2:\n        return number\n"
    "    return fibonacci(number - 1) + fibonacci(number - 2)\n\n",
    "import json\nimport os\nfrom pathlib import Path\n\n\ndef load(path: str) -> dict[str, int]:\n"
    '    """Return the settings that are stored in a file."""\n    with open(path) as stream:\n'
    "        return json.load(stream)\n\n",
    "class Counter:\n    def __init__(self) -> None:\n        self.value = 0\n\n    def add(self, amount=1):\n"
    '        self.value += amount\n        return self.value\n\n\nif __name__ == "__main__":\n    main()\n',
    "for index, line in enumerate(lines):\n    if not line.strip():\n        continue\n"
    "    try:\n        print(f'{index}: {line}')\n    except ValueError as error:\n        raise SystemExit(1)\n",
    "Traceback (most recent call last):\n  File \"main.py\", line 12, in <module>\nKeyError: 'name'\n",
    "$ git status\nOn branch main\nnothing to commit, working tree clean\n$ grep -rn TODO src | wc -l\n17\n",
    "| name | value | unit |\n| --- | --- | --- |\n| length | 12.5 | cm |\n\n# Results\n\n* first\n* second\n\n---\n",
    '<p>One paragraph, <b>bold</b>.</p>\n<a href="https://example.com/index.html?q=1&amp;lang=en">link</a>\n',
    "Ein kleiner Satz auf Deutsch: Die Straße führt über die Brücke. Où est la bibliothèque? ¿Dónde está la playa?\n",
    "Привет, мир! Как дела? 你好，世界。今天天气很好。こんにちは、世界。 안녕하세요. Ελλάδα, שלום, مرحبا.\n",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 20 24 25 30 32 36 42 48 50 60 64 72 80 90 99 100 128 200 256 \n"
    "365 404 500 512 1000 1024 2000 2024 2048 4096 10000 3.14 2.718 0.5 0.25 -1 1e-5\n",
)
