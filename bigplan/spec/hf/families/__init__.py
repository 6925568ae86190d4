"""The families of Hugging Face models that are known: a file each, and a line below."""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.spec.hf.families.afmoe import AFMOE
from bigplan.spec.hf.families.apertus import APERTUS, APERTUS_1_5_TEXT
from bigplan.spec.hf.families.arcee import ARCEE, JAIS2, NEMOTRON
from bigplan.spec.hf.families.aria import ARIA_TEXT
from bigplan.spec.hf.families.axk1 import AXK1
from bigplan.spec.hf.families.bamba import BAMBA
from bigplan.spec.hf.families.beside_towers import BESIDE_TOWERS
from bigplan.spec.hf.families.bloom import BLOOM
from bigplan.spec.hf.families.cohere import COHERE, COHERE2, COHERE_COMPASS_TEXT
from bigplan.spec.hf.families.cwm import CWM
from bigplan.spec.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from bigplan.spec.hf.families.ernie import ERNIE
from bigplan.spec.hf.families.ernie_moe import ERNIE_MOE
from bigplan.spec.hf.families.exaone import EXAONE, EXAONE4
from bigplan.spec.hf.families.exaone_moe import EXAONE_MOE
from bigplan.spec.hf.families.experts import MIXTRAL, QWEN3_MOE
from bigplan.spec.hf.families.falcon import FALCON
from bigplan.spec.hf.families.falcon_h1 import FALCON_H1
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.flint import FLINT
from bigplan.spec.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from bigplan.spec.hf.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from bigplan.spec.hf.families.glm import GLM, GLM4
from bigplan.spec.hf.families.glm_flash import GLM4_MOE_LITE
from bigplan.spec.hf.families.gpt2 import GPT2, GPT_BIGCODE
from bigplan.spec.hf.families.gpt_neo import GPT_NEO
from bigplan.spec.hf.families.gpt_neox import GPT_NEOX
from bigplan.spec.hf.families.gpt_oss import GPT_OSS
from bigplan.spec.hf.families.gptj import CODEGEN, GPTJ
from bigplan.spec.hf.families.granite import GRANITE
from bigplan.spec.hf.families.granite_hybrid import GRANITE_HYBRID
from bigplan.spec.hf.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from bigplan.spec.hf.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from bigplan.spec.hf.families.hunyuan import HUNYUAN
from bigplan.spec.hf.families.hunyuan_moe import HUNYUAN_MOE
from bigplan.spec.hf.families.hy_v3 import HY_V3
from bigplan.spec.hf.families.hyperclovax import HYPERCLOVAX
from bigplan.spec.hf.families.kolibri import KOLIBRI1
from bigplan.spec.hf.families.lara_mini import LARA_MINI
from bigplan.spec.hf.families.lfm2 import LFM2
from bigplan.spec.hf.families.lfm2_moe import LFM2_MOE
from bigplan.spec.hf.families.lfm3 import LFM3
from bigplan.spec.hf.families.llama import LLAMA, MISTRAL
from bigplan.spec.hf.families.llama4 import LLAMA4
from bigplan.spec.hf.families.llamas import HELIUM, INTERNLM3, IQUESTCODER
from bigplan.spec.hf.families.mamba2 import MAMBA2
from bigplan.spec.hf.families.mellum import MELLUM
from bigplan.spec.hf.families.minicpm3 import MINICPM3
from bigplan.spec.hf.families.minimax import MINIMAX_M2
from bigplan.spec.hf.families.ministral import MINISTRAL
from bigplan.spec.hf.families.ministral3 import MINISTRAL3
from bigplan.spec.hf.families.mistral4 import MISTRAL4
from bigplan.spec.hf.families.mpt import MPT
from bigplan.spec.hf.families.nanochat import NANOCHAT
from bigplan.spec.hf.families.nemotron_h import NEMOTRON_H
from bigplan.spec.hf.families.olmo import OLMO, OLMO2, OLMO3
from bigplan.spec.hf.families.olmo_hybrid import OLMO_HYBRID
from bigplan.spec.hf.families.olmoe import FLEX_OLMO, OLMOE
from bigplan.spec.hf.families.opt import OPT
from bigplan.spec.hf.families.phi import PHI
from bigplan.spec.hf.families.phi3 import PHI3
from bigplan.spec.hf.families.phimoe import PHIMOE
from bigplan.spec.hf.families.qwen import QWEN2, QWEN3
from bigplan.spec.hf.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from bigplan.spec.hf.families.qwen3_next import QWEN3_NEXT
from bigplan.spec.hf.families.sarvam import SARVAM_MLA, SARVAM_MOE
from bigplan.spec.hf.families.seed_oss import SEED_OSS
from bigplan.spec.hf.families.shared_experts import DOTS1, GLM4_MOE, QWEN2_MOE
from bigplan.spec.hf.families.smollm3 import SMOLLM3
from bigplan.spec.hf.families.solar_open import SOLAR_OPEN
from bigplan.spec.hf.families.stablelm import STABLELM
from bigplan.spec.hf.families.starcoder2 import STARCODER2
from bigplan.spec.hf.families.vault_gemma import VAULT_GEMMA
from bigplan.spec.hf.families.youtu import YOUTU

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "smollm3": SMOLLM3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "bloom": BLOOM,
    "phi3": PHI3,
    "stablelm": STABLELM,
    "falcon": FALCON,
    "starcoder2": STARCODER2,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "cohere_compass_text": COHERE_COMPASS_TEXT,
    "glm": GLM,
    "glm4": GLM4,
    "exaone": EXAONE,
    "exaone4": EXAONE4,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE,
    "arcee": ARCEE,
    "nemotron": NEMOTRON,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "cwm": CWM,
    "vaultgemma": VAULT_GEMMA,
    "youtu": YOUTU,
    "phi": PHI,
    "gptj": GPTJ,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE,
    "glm4_moe": GLM4_MOE,
    "dots1": DOTS1,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2,
    "kimi_k2": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "hunyuan_v1_dense": HUNYUAN,
    "olmoe": OLMOE,
    "afmoe": AFMOE,
    "flex_olmo": FLEX_OLMO,
    "phimoe": PHIMOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "axk1": AXK1,
    "kolibri1": KOLIBRI1,
    "flint": FLINT,
    "aria_text": ARIA_TEXT,
    "mistral4": MISTRAL4,
    "solar_open": SOLAR_OPEN,
    "minimax_m2": MINIMAX_M2,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "ernie4_5_moe": ERNIE_MOE,
    "hy_v3": HY_V3,
    "exaone_moe": EXAONE_MOE,
    "sarvam_moe": SARVAM_MOE,
    "sarvam_mla": SARVAM_MLA,
    "mellum": MELLUM,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "granite_swa": GRANITE_SWA,
    "granitemoe_swa": GRANITE_MOE_SWA,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": LFM3,
    "qwen3_next": QWEN3_NEXT,
    "olmo_hybrid": OLMO_HYBRID,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "lara_mini": LARA_MINI,
    "granitemoehybrid": GRANITE_HYBRID,
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "mamba2": MAMBA2,
    "nanochat": NANOCHAT,
    "jais2": JAIS2,
    "helium": HELIUM,
    "internlm3": INTERNLM3,
    "iquestcoder": IQUESTCODER,
    "hyperclovax": HYPERCLOVAX,
    "llama4_text": LLAMA4,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "apertus": APERTUS,
    "apertus1p5_text": APERTUS_1_5_TEXT,
    "gpt_neo": GPT_NEO,
    "gpt_bigcode": GPT_BIGCODE,
    "codegen": CODEGEN,
    "mpt": MPT,
    "minicpm3": MINICPM3,
    **BESIDE_TOWERS,
}
