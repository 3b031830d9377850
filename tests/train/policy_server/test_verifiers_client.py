"""The client with which verifiers trains, against the policy server. `make test-guests` installs verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import serving

from lachesis_client.sampling import Sampling

pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-guests` installs it")


async def test_turns_of_verifiers_train_client_are_ids_of_the_policy(tmp_path: Path) -> None:
    import verifiers.v1 as vf
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import SamplingConfig, UserMessage

    async with serving("Rain all day.", token="sesame", context_length=200) as it:
        it.sampler.codec.tokenizer.save_pretrained(tmp_path)
        config = TrainClientConfig(
            base_url=it.server.base_url,
            headers={"Authorization": "Bearer sesame"},
            renderer=DefaultRendererConfig(),
            renderer_model_name=str(tmp_path),
        )
        client = TrainClient(config)
        task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="x"))
        trace = vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()))
        messages = [UserMessage(content="How is the weather?")]
        sampling = SamplingConfig(temperature=1.0, max_tokens=20, cache_salt="1")
        for _ in range(2):
            turn = prepare_turn(trace, messages)
            answer = await client.get_response(ChatDialect(), {"model": "policy"}, sampling, turn=turn)
            turn.commit(answer)
            messages = [*messages, answer.message, UserMessage(content="And tomorrow?")]
        with pytest.raises(Exception, match="maximum context length"):
            await client.get_response(
                ChatDialect(),
                {"model": "policy"},
                sampling,
                turn=prepare_turn(trace, [UserMessage(content="word " * 500)]),
            )
        await client.close()
        (branch,) = trace.branches
        asked = [seen["prompt_ids"] for seen in it.sampler.calls]
        assert len(asked) == 2 and asked[1][: len(asked[0])] == asked[0]
        ids = [token for token, sampled in zip(branch.token_ids, branch.sampled_mask, strict=True) if sampled]
        said = [*it.sampler.codec.encode("Rain all day."), min(it.sampler.model.end_ids)]
        assert ids == said * 2 and branch.token_ids == asked[1] + said
        logprobs = [value for value, sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if sampled]
        scores = [it.sampler.model.score(prompt, said, Sampling(1)) for prompt in asked]
        assert logprobs == pytest.approx([score for turn in scores for score in turn])
