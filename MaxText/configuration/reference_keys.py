"""Keys of GPT-Neo's model files and of fattorib/transformer's, and ours that say the same.

Their values mean something else (a global batch, a width of one head that is computed), so they are
no other names: a key of theirs is refused with ours. docs/gpt_neo.md and docs/fattorib.md have the
rest of the tables.
"""

_GPT_NEO = "GPT-Neo's name"
_FATTORIB = "the name of fattorib/transformer"

# Key of theirs -> (whose it is, key of ours).
REFERENCE_KEYS: dict[str, tuple[str, str]] = {
    **{
        theirs: (_GPT_NEO, ours)
        for theirs, ours in {
            "n_embd": "base_emb_dim",
            "n_head": "base_num_query_heads",
            "n_layer": "base_num_decoder_layers",
            "n_vocab": "vocab_size",
            "n_ctx": "max_target_length",
            "local_attention_radius": "sliding_window_size",
            "rotary_emb": "position_embedding",
            "axial_pos_emb": "axial_pos_shape",
            "no_weight_tie": "logits_via_embedding",
            "scalenorm": "normalization_type",
            "rezero": "use_rezero",
            "macaron": "use_macaron",
            "mlp_glu": "mlp_activations",
            "activation_function": "mlp_activations",
            "activation_fn": "mlp_activations",
            "scale_by_depth": "init_scale_by_depth",
            "scale_by_in": "init_scale_by_in",
            "embed_dropout": "embedding_dropout_rate",
            "attn_dropout": "attention_dropout_rate",
            "res_dropout": "residual_dropout_rate",
            "moe_num_experts": "num_experts",
            "moe_hidden_size": "moe_mlp_dim",
            "moe_loss_coef": "load_balance_loss_weight",
            "lr": "learning_rate",
            "lr_decay": "lr_schedule_type",
            "lr_decay_end": "learning_rate_schedule_steps",
            "opt_name": "opt_type",
            "weight_decay": "adam_weight_decay",
            "ada_epsilon1": "adafactor_epsilon_gradient",
            "ada_epsilon2": "adafactor_epsilon_parameter",
            "gradient_clipping": "gradient_clipping_threshold",
            "entmax_loss": "loss_type",
            "train_batch_size": "per_device_batch_size",
            "eval_batch_size": "eval_per_device_batch_size",
            "tokens_per_mb_per_replica": "gradient_accumulation_steps",
            "num_microbatches": "gradient_accumulation_steps",
            "train_steps": "steps",
            "predict_steps": "sample_tokens",
            "recompute_grad": "remat_policy",
            "model_path": "base_output_directory",
            "steps_per_checkpoint": "checkpoint_period",
            "mesh_shape": "ici_data_parallelism",
            "layout": "logical_axis_rules",
            "datasets": "dataset_mix",
        }.items()
    },
    **{
        theirs: (_FATTORIB, ours)
        for theirs, ours in {
            "embedding_dim": "base_emb_dim",
            "num_head": "base_num_query_heads",
            "block_size": "max_target_length",
            "alibi_attn": "position_embedding",
            "fused_residuals": "parallel_residual_shared_norm",
            "use_static_sgu": "static_sgu",
            "head_qk_trick": "head_qk",
            "peak_learning_rate": "learning_rate",
            "end_learning_rate": "learning_rate_final_fraction",
            "total_steps": "steps",
            "evaluation_frequency": "eval_interval",
            "maximum_evaluation_steps": "eval_steps",
            "warmup_train_context": "sequence_length_stages",
        }.items()
    },
}
