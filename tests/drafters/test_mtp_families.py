"""Modules with a layer of the target's own kind, in targets that run through transformers.

Targets are random and tiny; the modules lie in a shard of their own, under the names of the
releases. The judge runs transformers' layer over the whole text, and transformers' own MtpModel.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import FeatureChain
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.mtp import FamilyModule
from forespeak.engine.llm import LLM
from forespeak.engine.target import load_target
from forespeak.models.adapter import TransformersModel, load_adapter
from forespeak.models.adapter_config import model_config
from forespeak.models.adapter_masks import MaskRules
from forespeak.sampling import SamplingParams
from forespeak.types import Frontier, Observation, SpeculationConfig
from tests.drafters.feature_rounds import FeatureRounds
from tests.drafters.mtp_cases import NEXTN, QWEN, Block, Formulas, Layout, write_folder

pytestmark = pytest.mark.slow

V, H, LAYERS = 83, 32, 3
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "num_key_value_heads": 4,
}  # fmt: skip
_FULL = {"layer_types": ["full_attention"] * LAYERS, "head_dim": 16}
_DENSE_FIRST = {"first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", NEXTN, SIZES | _ROUTED | _LATENT | _DENSE_FIRST),
    "deepseek_v3 dense": (
        "DeepseekV3", NEXTN, SIZES | _ROUTED | _LATENT | {"first_k_dense_replace": 3}
    ),
    "glm4_moe": ("Glm4Moe", NEXTN, SIZES | _ROUTED | _DENSE_FIRST | {"head_dim": 8}),
    "glm4_moe normed heads": (
        "Glm4Moe", NEXTN, SIZES | _ROUTED | _DENSE_FIRST | {"head_dim": 8, "use_qk_norm": True}
    ),
    "glm4_moe_lite": ("Glm4MoeLite", NEXTN, SIZES | _ROUTED | _LATENT),
    "qwen3_5_text": ("Qwen3_5", QWEN, SIZES | _FULL),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A target on disk that carries modules.

    Attributes:
        language_model: transformers' own.
        layers: the modules' blocks.
        tensors: of the modules, by the names of the release.
    """

    folder: Path
    layout: Layout
    language_model: Any
    layers: list[Any]
    tensors: dict[str, Tensor]

    def formulas(self, **conventions: bool) -> Formulas:
        offset = 1.0 if self.layout is QWEN else 0.0
        given = {"normed": self.layout.normed, "zeros": self.layout.zeros} | conventions
        return Formulas(
            self.layout, self.tensors, self.language_model.get_input_embeddings().weight.detach(),
            self.language_model.lm_head.weight.detach(),
            [block_of(layer, self.language_model) for layer in self.layers],
            eps=self.language_model.config.rms_norm_eps, offset=offset, **given,
        )  # fmt: skip

    def opened(
        self, rows: int = 1, drafter: Path | None = None, state: str | None = None
    ) -> FeatureChain:
        model = adapted(self)
        config = SpeculationConfig(
            method="mtp", drafter=str(drafter or self.folder), recursion_state=state
        )
        made = load_drafter(config, TargetParts(model), num_rows=rows)
        assert isinstance(made, FeatureChain)
        return made


def adapted(made: Made) -> TransformersModel:
    """The target; past the loader where that refuses the whole class for its recurrent layers."""
    if made.layout is not QWEN:
        return load_adapter(made.folder)
    text = made.language_model.config
    described = model_config(text, made.language_model.generation_config, 128)
    return TransformersModel(made.language_model, described, MaskRules.from_text_config(text))


def block_of(layer: Any, language_model: Any) -> Block:
    """transformers' layer over a whole text, without a cache."""

    @torch.no_grad()
    def block(x: Tensor, positions: Sequence[int]) -> Tensor:
        n = len(positions)
        places = torch.tensor([list(positions)])
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        rotation = language_model.model.rotary_emb(x[None], places)
        out = layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=rotation)
        found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    return block


def make(root: Path, name: str, count: int = 1, *, copies: bool = False) -> Made:
    stem, layout, sizes = FAMILIES[name]
    config_class = getattr(transformers, f"{stem}{'Text' if stem == 'Qwen3_5' else ''}Config")
    torch.manual_seed(0)
    config = config_class(**sizes)
    language_model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    randomise(language_model, 1)
    folder = root / "target"
    language_model.save_pretrained(folder)
    layers = [new_block(language_model) for _ in range(count)]
    tensors: dict[str, Tensor] = {}
    for module, layer in enumerate(layers):
        randomise(layer, 10 + module)
        prefix = layout.place(layout.block, module)
        tensors |= {prefix + name: t for name, t in one_by_one(layer.state_dict()).items()}
        generator = torch.Generator().manual_seed(20 + module)
        centre = 0.0 if layout is QWEN else 1.0
        for template in (layout.embed_norm, layout.state_norm, layout.last_norm):
            gain = centre + 0.2 * torch.randn(H, generator=generator)
            tensors[layout.place(template, module)] = gain
        joint = torch.randn((H, 2 * H), generator=generator) / H**0.5
        tensors[layout.place(layout.joint, module)] = joint
        if copies:
            own = f"model.layers.{LAYERS + module}."
            embedding = language_model.get_input_embeddings().weight.detach().clone()
            tensors[own + "embed_tokens.weight"] = embedding
            tensors[own + "shared_head.head.weight"] = (
                language_model.lm_head.weight.detach().clone()
            )
    add_shard(folder, tensors)
    values = json.loads((folder / "config.json").read_text())
    values["mtp_num_hidden_layers" if layout is QWEN else "num_nextn_predict_layers"] = count
    (folder / "config.json").write_text(json.dumps(values))
    return Made(folder, layout, language_model, layers, tensors)


def new_block(language_model: Any) -> Any:
    """A layer like the model's, with experts where the release's modules have them."""
    config = copy.deepcopy(language_model.config)
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"] * LAYERS
    return type(language_model.model.layers[-1])(
        config, config.num_hidden_layers - 1 if not hasattr(config, "first_k_dense_replace") else 99
    ).eval()


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int) -> None:
    """Weights that make logits differ, with gains and biases that show when left out."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            values = 0.1 * values if "bias" in name else tensor + 0.2 * values
        elif "embed" not in name:
            values = values / tensor.shape[-1] ** 0.5
        tensor.copy_(values)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as releases store them, each with three matrices of its own."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{prefix}{number}.gate_proj.weight"] = gate.clone()
                found[f"{prefix}{number}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for number, down in enumerate(tensor):
                found[f"{prefix}{number}.down_proj.weight"] = down.clone()
        else:
            found[name] = tensor
    return found


def add_shard(folder: Path, tensors: dict[str, Tensor]) -> None:
    """The modules as a second shard, and the index of both."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / second)
    places = dict.fromkeys(load_file(folder / first), first) | dict.fromkeys(tensors, second)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_laws_are_the_formulas(tmp_path, name, count):
    made = make(tmp_path, name, count, copies="deepseek" in name)
    drafter, judge = made.opened(rows=2), made.formulas()
    rounds = FeatureRounds(drafter, judge.observe, random.Random(count), V)
    rounds.start(1, 5)
    rounds.start(0, 1)
    rounds.round(depth=3, width=2)
    rounds.stop(0)
    rounds.start(0, 2)
    rounds.round(depth=3, width=2)
    judge.check(rounds.laws)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("count", [1, 2])
def test_transformers_own_modules_say_the_same(tmp_path, name, count):
    """MtpModel of transformers keeps the first embedding and hands on normed states."""
    made = make(tmp_path, name, count)
    theirs: Any = MtpModel(made.language_model, count)
    theirs.eval()
    layers = theirs.layers
    for module in range(count):
        own = f"model.layers.{LAYERS + module}."
        layers[module].mtp_block = made.layers[module]
        state = {
            "enorm.weight": own + "enorm.weight",
            "hnorm.weight": own + "hnorm.weight",
            "eh_proj.weight": own + "eh_proj.weight",
            "post_norm.weight": own + "shared_head.norm.weight",
        }
        layers[module].load_state_dict(
            {key: made.tensors[place] for key, place in state.items()}, strict=False
        )
    values = json.loads((made.folder / "config.json").read_text())
    values["mtp_zero_first_embedding"] = False
    (made.folder / "config.json").write_text(json.dumps(values))
    drafter = made.opened(state="normed")
    text = [5, 17, 3, 60, 22, 41, 8]
    hidden = made.language_model(torch.tensor([text[:-1]]), output_hidden_states=True)
    states = hidden.hidden_states[-1].detach()  # [1, n, H] after the final norm
    drafts, logits = their_drafts(made, layers, torch.tensor([text]), states)

    drafter.admit(0)
    drafter.observe([Observation(0, tuple(text[:-1]), states[0])])
    laws = [drafter.propose([0], [text[-1]], count).logits[0, 0]]
    for depth in range(1, count):
        frontier = Frontier(0, (depth,), (drafts[depth - 1],), (depth - 1,))
        laws.append(drafter.expand([frontier]).logits[0, 0])
    torch.testing.assert_close(torch.stack(laws), logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def their_drafts(made: Made, layers: Any, ids: Tensor, states: Tensor) -> tuple[list[int], Tensor]:
    """Drafts and their logits [M, V] by transformers' layers: each module one token further."""
    model, n = made.language_model, states.shape[1]
    tokens, drafts, laws = ids[:, 1:], [], []
    for module in range(len(layers)):
        places = torch.arange(module + 1, module + 1 + n)[None]
        embedded = model.get_input_embeddings()(tokens)
        states = layers[module](
            embedded, states, position_embeddings=model.model.rotary_emb(embedded, places),
            attention_mask=torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None],
            position_ids=places, cache=None,
        )  # fmt: skip
        laws.append(model.lm_head(states[0, -1]))
        drafts.append(int(laws[-1].argmax()))
        tokens = torch.cat([tokens[:, 1:], torch.tensor([[drafts[-1]]])], dim=1)
    return drafts, torch.stack(laws)


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_texts_equal_plain_decoding(tmp_path, name):
    made = make(tmp_path, name, copies=True)
    target = load_target(str(made.folder), dtype="float32", device="cpu")
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    plain = LLM(target).generate([4, 5, 6], params)
    for builder in ("chain", "dynamic_tree", "static_tree"):
        spoken = LLM(target, method="mtp", builder=builder).generate([4, 5, 6], params)
        assert spoken.token_ids == plain.token_ids, builder
        assert spoken.stats.num_drafted > 0


def test_bfloat16_keeps_the_router_in_float32(tmp_path):
    made = make(tmp_path, "deepseek_v3")
    target = load_target(str(made.folder), dtype="bfloat16", device="cpu")
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    assert len(LLM(target, method="mtp").generate([4, 5, 6], params).token_ids) == 6
    drafter = load_drafter(SpeculationConfig(method="mtp"), target.parts)
    assert isinstance(drafter, FeatureChain)
    module = drafter._modules[0]
    assert isinstance(module, FamilyModule)
    layer: Any = module.layer.module
    assert layer.mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert layer.self_attn.o_proj.weight.dtype == torch.bfloat16


def test_an_export_of_the_modules_alone(tmp_path):
    """SGLang's: another file name, layer number 0, and the whole model's index beside it."""
    made = make(tmp_path, "deepseek_v3")
    alone = tmp_path / "alone"
    renamed = {n.replace(f"layers.{LAYERS}.", "layers.0."): t for n, t in made.tensors.items()}
    values = json.loads((made.folder / "config.json").read_text())
    write_folder(alone, values | {"num_hidden_layers": 1}, renamed)
    (alone / "model.safetensors").rename(alone / "nextn_layer_parameters.safetensors")
    index = (made.folder / "model.safetensors.index.json").read_text()
    (alone / "model.safetensors.index.json").write_text(index)
    judge, drafter = made.formulas(), made.opened(drafter=alone)
    rounds = FeatureRounds(drafter, judge.observe, random.Random(0), V)
    rounds.start(0, 4)
    rounds.round(depth=2, width=2)
    judge.check(rounds.laws)
