"""What other tools call the keys of descriptions: for hints where one of their words is used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

# Characters up to which similar words are searched, in time that grows with their square.
LONGEST_WORD = 100

# Similarity (2 x equal characters / all) of a word that is meant: 'gpo' and 'gpu' have 0.67, and
# 'mamba' and 'llama', which are not, 0.6.
CLOSE = 0.65

# By our key: words of Hugging Face's config.json and TrainingArguments, of Megatron-LM, DeepSpeed
# and papers.
_OF_OTHERS: Mapping[str, str] = {
    # a model
    "name": "_name_or_path model_name name_or_path",
    "layers": "num_hidden_layers num_layers n_layers n_layer depth",
    "hidden": "hidden_size d_model n_embd n_embed dim embed_dim",
    "ffn": "intermediate_size intermediate n_inner ffn_dim d_ff ffn_hidden_size ffn_hidden "
    "block_ff_dim mlp_hidden_size moe_intermediate_size moe_ffn_hidden_size",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "experts_per_token": "num_experts_per_tok moe_router_topk top_k moe_k moe_topk top_k_experts",
    "router_normalised": "norm_topk_prob",
    "router_loss": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef",
    "routing": "n_group topk_group routed_scaling_factor use_expert_bias scoring_func "
    "moe_router_score_function router_scaling_factor route_scale router_jitter_noise",
    "expert_norms": "enable_moe_block",
    "shared_ffn": "n_shared_experts shared_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size moe_num_shared_experts num_shared_experts shared_experts "
    "shared_expert num_shared_expert",
    "dense_blocks": "first_k_dense_replace mlp_only_layers mlp_layer_types moe_layer_start_index "
    "num_dense_layers",
    "expert_pattern": "interleave_moe_layer_step moe_layers decoder_sparse_step moe_layer_freq "
    "moe_layer_interval",
    "expert_latent": "moe_latent_size",
    "dense_ffn": "intermediate_size_mlp",
    "attention_chunk": "attention_chunk_size",
    "global_query_growth": "attn_scale floor_scale",
    "norms": "use_post_norm use_sandwich_norm",
    "attention_gate": "use_attention_gate",
    "heads": "num_attention_heads num_heads n_heads n_head attention_heads",
    "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads num_query_groups key_value_heads "
    "multi_query",
    "head_dim": "kv_channels head_size d_head d_kv",
    "global_heads": "global_head_dim num_global_key_value_heads per_layer_config",
    "keys_as_values": "attention_k_eq_v",
    "key_sharing": "num_kv_shared_layers use_double_wide_mlp",
    "block_inputs": "hidden_size_per_layer_input vocab_size_per_layer_input",
    "latent_attention": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    "convolution": "conv_l_cache conv_bias",
    "delta_rule": "linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim linear_allow_neg_eigval",
    "state_space": "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv "
    "mamba_conv_bias mamba_proj_bias time_step_limit mamba_num_heads mamba_head_dim n_groups "
    "ssm_state_size state_size conv_kernel use_conv_bias mamba_rms_norm ssm_multipliers",
    "mixer_pattern": "full_attn_idxs full_attention_interval attn_layer_indices "
    "hybrid_override_pattern layers_block_type",
    "vocab": "vocab_size padded_vocab_size vocabulary_size output_vocab_size",
    "max_sequence_length": "max_position_embeddings n_positions n_ctx max_seq_len context_length "
    "max_length",
    "norm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps",
    "mlp": "hidden_act hidden_activation activation_function activation mlp_hidden_act",
    "positions": "position_embedding_type",
    "rope_theta": "rotary_base rotary_emb_base",
    "rope_scaling": "rope_parameters",
    "rotary_fraction": "partial_rotary_factor rotary_pct rotary_percent rotary_dim",
    "local_rope_theta": "rope_local_base_freq layer_rope_theta",
    "sliding_window": "window_size",
    "attention_pattern": "layer_types sliding_window_pattern no_rope_layers "
    "global_attn_every_n_layers attention_types",
    "score_scale": "query_pre_attn_scalar attention_multiplier key_multiplier",
    "embedding_scale": "embedding_multiplier mup_enabled scale_emb",
    "residual_scale": "residual_multiplier scale_depth",
    "gate_scale": "mlp_multipliers",
    "attention_beside": "attention_out_multiplier ssm_out_multiplier",
    "logit_scale": "logits_scaling lm_head_multiplier dim_model_base",
    "score_cap": "attn_logit_softcapping attn_logit_softcap",
    "logit_cap": "final_logit_softcapping final_logit_softcap",
    "parallel_residual": "use_parallel_residual parallel_attn",
    "tied_embeddings": "tie_word_embeddings tie_embedding tie_embeddings",
    "qkv_bias": "attention_bias use_bias use_qkv_bias add_qkv_bias enable_bias bias",
    "qk_norm": "use_qk_norm qk_layernorm",
    # a training
    "sequence_length": "seq_len seq_length max_seq_length max_seq_len block_size context_length "
    "max_length",
    "global_batch": "batch_size global_batch_size train_batch_size",
    "tokens_per_step": "batch_tokens tokens_per_batch",
    "precision": "dtype torch_dtype mixed_precision params_dtype",
    "clip_norm": "max_grad_norm gradient_clipping clip_grad grad_clip gradient_clip_val",
    "learning_rate": "lr max_lr",
    "epsilon": "eps adam_epsilon adam_eps",
    "beta1": "adam_beta1 betas",
    "beta2": "adam_beta2",
    "weight_decay": "wd",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "warmup_steps": "warmup num_warmup_steps warmup_num_steps lr_warmup_iters",
    "final_fraction": "min_lr min_lr_ratio",
    "steps": "max_steps train_iters num_steps iterations",
    "data": "dataset data_path dataset_name train_data",
    "isolate_documents": "reset_attention_mask padding_free block_causal sample_packing packing",
    "validation": "eval evaluation",
    "preference": "dpo orpo simpo pref_loss loss_type preference_loss",
    "beta": "pref_beta dpo_beta orpo_beta",
    "gamma": "simpo_gamma",
    "label_smoothing": "label_smoothing_factor dpo_label_smoothing",
    "weights": "checkpoint pretrained init_from from adapter adapter_name_or_path",
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "targets": "target_modules lora_target_modules lora_target",
    "rank_stabilised": "use_rslora rslora",
    "dropout": "lora_dropout",
    # decisions
    "micro_batch": "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size "
    "local_batch_size",
    "recompute": "recomputation activation_checkpointing gradient_checkpointing",
    "tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "dp": "data_parallel data_parallel_size",
    "zero": "zero_stage stage fsdp",
    "optimizer": "optimizer_state optimizer_states offload_optimizer",
    "parameters": "params offload_param",
    "gradients": "grads",
    # an experiment
    "nodes": "num_nodes nnodes n_nodes",
    "caps": "limits memory_limits",
    "set": "micro_batch recompute tp pp dp cp ep zero vpp",  # decisions stand in it
    # a cluster, and its memories
    "gpus_per_node": "gpus num_gpus n_gpus gpus_per_machine nproc_per_node num_processes",
    "memory": "ram mem vram memory_size",
    "cores": "cpus threads num_cpus cpu_cores",
    "drives": "disks ssds num_drives",
    "gpu": "vram device cuda",
    "host": "ram cpu dram",
    "nvme": "ssd disk drive drives",
}


def meant(word: str, known: Iterable[str], below: Iterable[str] = ()) -> str | None:
    """The key that a word stands for: the same in another tool's words, or else the closest one.

    `known` are the keys that may stand where the word does, `below` those deeper down, with dots:
    they are meant only by their own name, or another tool's word for it.
    """
    if len(word) > LONGEST_WORD:
        return None
    names = list(known)
    same = (name for name in (*names, *below) if _stands_for(word.lower(), name))
    close = difflib.get_close_matches(word, names, n=1, cutoff=CLOSE)
    return next(same, close[0] if close else None)


def translated(word: str, known: Iterable[str]) -> bool:
    """Whether another tool calls one of the `known` keys so."""
    return any(_stands_for(word.lower(), name) for name in known)


def _stands_for(word: str, name: str) -> bool:
    (above, _, last), (where, _, key) = word.rpartition("."), name.rpartition(".")
    return above in ("", where) and (last == key or last in _OF_OTHERS.get(key, "").split())


def did_you_mean(word: str, known: Iterable[str], below: Iterable[str] = ()) -> str:
    """The text "; did you mean 'nodes'?", or an empty one."""
    found = meant(word, known, below)
    return f"; did you mean {found!r}?" if found else ""
