"""The conformance suite on every engine: with a fake of each API, and with llama.cpp itself. And their differences."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from pathlib import Path

import pytest
from engine_bench import ALL, FAKED, bench
from hypothesis import given
from hypothesis import strategies as st

from lachesis_client import Unauthorized
from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_testing.engine_suite import EngineSuite
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.embedded import EmbeddedServer
from lachesis_tokens.engines.llama_cpp import align

DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.fixture(scope="module")
def embedded(request, tmp_path_factory):
    if not any("llama.cpp" in item.name for item in request.session.items):
        yield None
        return
    runner = asyncio.Runner()
    server = EmbeddedServer(context=512, parallel=2, log=tmp_path_factory.mktemp("llama") / "log")
    runner.run(server.start())
    yield server
    runner.run(server.stop())
    runner.close()


@pytest.mark.parametrize("engine_name", ALL)
class TestEveryEngine(EngineSuite):
    @pytest.fixture
    def opened(self, engine_name, embedded):
        return lambda policy=None, **server: bench(engine_name, embedded, policy, **server)

    async def test_its_kind_is_its_name(self, engine_name):
        assert create_engine(engine_name, ServerSettings("http://x/v1", "m")).kind == engine_name


class TestTheExampleOfTheDocs(EngineSuite):
    engine = "my_engine:MyEngine"

    @pytest.fixture(autouse=True)
    def my_engine(self, tmp_path, monkeypatch):
        blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        [example] = [block for block in blocks if "class MyEngine(" in block]
        (tmp_path / "my_engine.py").write_text(example, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        yield
        sys.modules.pop("my_engine", None)


@pytest.mark.parametrize("kind", FAKED)
async def test_a_wrong_key_is_an_error_at_once(kind):
    async with bench(kind, None, api_key="right", settings={"api_key": "wrong", "max_retries": 5}) as it:
        with pytest.raises(Unauthorized, match="api_key") as caught:
            await it.engine.generate([5], Sampling(1))
        assert "wrong" not in str(caught.value)
        assert len(it.relay.request_lines) == 1


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang"])
async def test_the_version_of_the_weights_comes_with_the_tokens(kind):
    async with bench(kind, None, weight_version="step-7") as it:
        assert [one.model_version for one in await it.engine.generate([5], Sampling(1), n=2)] == ["step-7"] * 2
        it.server.update_weights("step-8", seed=1)
        assert [one.model_version for one in await it.engine.generate([5], Sampling(1))] == ["step-8"]


@pytest.mark.parametrize("kind", FAKED)
@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_logprobs_are_of_what_the_settings_say(kind, mode):
    if kind == "sglang":
        pytest.skip("has neither, without its own switch")
    async with bench(kind, None, logprobs_mode=mode, settings={"logprobs_mode": mode}) as it:
        sampling = Sampling(max_tokens=8, temperature=0.6, top_k=20, top_p=0.9)
        [one] = await it.engine.generate([5, 6], sampling)
        assert list(one.logprobs) == pytest.approx(it.server.model.score([5, 6], one.ids, sampling, mode))


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'ollama'\. .*atropos, llama\.cpp, sglang, vllm, vllm-generate"):
        create_engine("ollama", ServerSettings("http://x/v1", "m"))


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_a_position_is_certain_only_if_there_is_no_other(ids, data):
    kept = [place for place in range(len(ids)) if data.draw(st.booleans())]
    listed = [ids[place] for place in kept]
    places = align(ids, listed)
    ways = [way for way in itertools.combinations(range(len(ids)), len(kept)) if [ids[p] for p in way] == listed]
    for place, which in enumerate(places):
        if which is not None:
            assert all(way[which] == place for way in ways)
    for index in range(len(listed)):
        if len({way[index] for way in ways}) == 1:
            assert places[ways[0][index]] == index


def test_entries_that_are_not_in_the_ids_have_no_positions():
    assert align([1, 2, 3], [2, 1]) == [None, None, None]
    assert align([1, 2], [1, 2, 3]) == [None, None]
