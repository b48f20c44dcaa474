"""Each bad value of a control is refused with a sentence; good values pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams

NAN = float("nan")
INF = float("inf")

BAD = [
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 2.0}, "max_new_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"typical_p": "0.5"}, "typical_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {3: 101.0}}, "logit_bias of token 3"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": ("",)}, "bad_words"),
    ({"bad_words": ("  ",)}, "bad_words"),
    ({"allowed_token_ids": ()}, "allowed_token_ids"),
    ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
    ({"stop": "end"}, "stop"),
    ({"stop": ("",)}, "stop"),
    ({"stop_token_ids": (1.5,)}, "stop_token_ids"),
    ({"include_stop_str": True}, "include_stop_str"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs_after_processors": True}, "logprobs"),
    ({"json_object": True, "regex": "a"}, "json_object and regex"),
    ({"regex": ""}, "regex"),
    ({"json_schema": " "}, "json_schema"),
    ({"regex": "a+", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_values_are_refused(fields, named):
    with pytest.raises(OptionError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert named in message
    assert message.endswith(".")


def test_good_values_pass():
    controls = SamplingParams(
        max_new_tokens=1,
        min_tokens=1,
        temperature=1e-9,
        top_k=5,
        top_p=1,
        min_p=1,
        typical_p=0.01,
        repetition_penalty=0.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100},
        stop=("\n",),
        include_stop_str=True,
        logprobs=0,
        logprobs_after_processors=True,
        json_object=True,
    )
    assert controls.constraint == "json_object"
    assert not controls.is_greedy
    assert SamplingParams().constraint is None
    assert SamplingParams().is_greedy


def test_importing_controls_does_not_import_torch():
    code = "import sys, forespeak.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
