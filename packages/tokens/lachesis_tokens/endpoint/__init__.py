"""A model endpoint that records: agent programs ask it as they would ask OpenAI, and every token of a rollout is kept.

async with RecordingEndpoint(server) as endpoint:
    recording = endpoint.open(temperature=1.0, max_tokens=2048)
    ...  # a program that uses recording.base_url and recording.key
    await recording.close()
recording.result(Outcome.COMPLETED, "the program ended").samples()
"""

from lachesis_tokens.endpoint.endpoint import RecordingEndpoint
from lachesis_tokens.endpoint.recording import Recording

__all__ = ["Recording", "RecordingEndpoint"]
