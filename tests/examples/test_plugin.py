"""The example package: found through its entry point, exact under every builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "bigram"

WRITE = """
import json, sys
from forespeak.drafters.table import METHODS
from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory
from forespeak.sampling import SamplingParams
from tests.tiny import tiny_config, tiny_decoder

target = in_memory(tiny_decoder(tiny_config(eos_token_ids=())))
params = SamplingParams(max_new_tokens=40)
texts = {}
for builder in METHODS["bigram"].builders:
    answer = LLM(target, method="bigram", builder=builder).generate([5, 6, 7], params)
    texts[builder] = [list(answer.token_ids), answer.stats.num_drafted]
texts["plain"] = [list(LLM(target).generate([5, 6, 7], params).token_ids), 0]
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As after ``pip install``: the package and its metadata on the path."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = site / "forespeak_bigram-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join([str(site), str(EXAMPLE), str(Path(__file__).parents[2]), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_method_is_listed_with_the_others(environment: dict[str, str]) -> None:
    listed = json.loads(run(environment, "-m", "forespeak", "methods", "--json"))["methods"]
    assert [entry["name"] for entry in listed][-1] == "bigram"
    assert listed[-1]["builders"] == ["chain", "dynamic_tree", "static_tree"]


def test_listing_imports_no_torch(environment: dict[str, str]) -> None:
    program = "import sys, forespeak.drafters.table as t; print('torch' in sys.modules)"
    assert run(environment, "-c", program).strip() == "False"


def test_its_texts_are_plain_decodings(environment: dict[str, str]) -> None:
    texts = json.loads(run(environment, "-c", WRITE))
    plain, _ = texts.pop("plain")
    assert len(texts) == 3
    for builder, (tokens, num_drafted) in texts.items():
        assert tokens == plain, builder
        assert num_drafted > 0
