"""What somebody does who changes a record: computes its digests again, or takes them all away."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from lachesis_messages.records.digests import LINE_DIGEST, certified
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample

Record = dict[str, Any]


def resealed(record: Record) -> Record:
    """A sample, a group or a line of the export `samples`, changed by hand, with the digests of what it holds now."""
    found = copy.deepcopy(record)
    for sample in found.get("samples", [found]):
        if "digest" in sample:
            with suppress(MalformedSample):  # it is noticed with any digest
                sample["digest"] = read_sample(sample).header_digest()
    return certified(found) if LINE_DIGEST in found else found


def aged(record: Record) -> Record:
    """The same as an older version wrote it, without digests."""
    found = copy.deepcopy(record)
    found.pop(LINE_DIGEST, None)
    for sample in found.get("samples", [found]):
        sample.pop("digest", None)
        for span in sample["spans"]:
            span.pop("messages_digest", None)
            span.pop("completion_id", None)
    for rollout in found.get("rollouts", ()):
        rollout.pop("completions", None)
    return found
