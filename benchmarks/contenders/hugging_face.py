"""Hugging Face's Switch Transformers and T5 (PyTorch): the sparse layer, the dense layer, the training step, decoding.

The layer counts capacity by sequence, so each group is a sequence. Its experts are modules, called in a Python loop.
"""

import torch
import transformers
from layer_problem import LOAD_BALANCING_LOSS_WEIGHT, ROUTER_Z_LOSS_WEIGHT, arrays, expert_capacity, with_gradients
from step_problem import CROSS_ATTENTION_FACTOR, EMBEDDING_FACTOR, batch, tokens_of_a_step
from transformers.models.switch_transformers import modeling_switch_transformers as switch_transformers
from transformers.optimization import Adafactor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def layer(job):
    """Builds `SwitchTransformersSparseMLP`."""
    mlp = switch_transformers.SwitchTransformersSparseMLP(_layer_config(job)).to(DEVICE)
    tokens, kernel, _ = arrays(job)
    with torch.no_grad():
        mlp.router.classifier.weight.copy_(torch.from_numpy(kernel.T.copy()))
        kept = mlp.router(_on_device(tokens))[0].sum().item()
    logits = []
    mlp.router.register_forward_hook(lambda module, inputs, outputs: logits.append(outputs[2]))

    def router_loss():
        own = logits.pop()
        balance = switch_transformers.load_balancing_loss_func(own.softmax(-1), own.argmax(-1))
        return (LOAD_BALANCING_LOSS_WEIGHT * balance
                + ROUTER_Z_LOSS_WEIGHT * switch_transformers.router_z_loss_func(own))

    run, facts = _measure(job, mlp, router_loss)
    return run, {**facts, "fraction_dropped": round(1 - kept / tokens[..., 0].size, 4)}


def dense(job):
    """Builds `SwitchTransformersDenseActDense` on the same tokens."""
    mlp = switch_transformers.SwitchTransformersDenseActDense(_layer_config(job)).to(DEVICE)
    return _measure(job, mlp, lambda: 0.0)


def _layer_config(job):
    return transformers.SwitchTransformersConfig(
        d_model=job["d_model"], d_ff=job["d_ff"], num_experts=job["experts"], expert_capacity=job["capacity"],
        router_jitter_noise=0.0, dropout_rate=0.0)


def _measure(job, module, more_loss):
    tokens, _, upstream = (_on_device(array) for array in arrays(job))
    products = _products(job)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("wi.weight", "wo.weight")):
                weight.normal_(0, weight.shape[1] ** -0.5)
    module.train()
    leaf = tokens.clone().requires_grad_(True)

    def forward():
        with torch.no_grad(), products():
            outputs = module(tokens)
        _wait()
        return outputs

    def forward_backward():
        module.zero_grad(set_to_none=True)
        leaf.grad = None
        with products():
            loss = (module(leaf) * upstream).sum() + more_loss()
        loss.backward()
        _wait()

    facts = {"output_shape": list(forward().shape), "versions": VERSIONS,
             "parameters": sum(weight.numel() for weight in module.parameters())}
    return (forward_backward if with_gradients(job) else forward), facts


def step(job):
    """Builds a training step of `SwitchTransformersForConditionalGeneration`, or of T5 if the job has no experts."""
    model, products = _model(job).to(DEVICE).train(), _products(job)
    sources, targets = (_on_device(array).long() for array in batch(job))
    inputs = {"input_ids": sources, "attention_mask": torch.ones_like(sources), "labels": targets, "use_cache": False}
    if job["experts"]:
        inputs["output_router_logits"] = True
    if job["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], fused=True)
    else:
        optimizer = Adafactor(model.parameters(), lr=job["learning_rate"], relative_step=False, scale_parameter=True)
    losses = []

    def run():
        optimizer.zero_grad(set_to_none=True)
        with products():
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    run()
    return run, {"parameters": sum(weight.numel() for weight in model.parameters()), "first_loss": round(losses[0], 3),
                 "versions": VERSIONS}


def _on_device(array):
    return torch.from_numpy(array).to(DEVICE)


def _products(job):
    """Returns a function that makes the scope in which products have the job's dtype."""
    is_float32 = job.get("dtype", "float32") == "float32"
    torch.backends.cuda.matmul.allow_tf32 = True  # as JAX multiplies float32 numbers by default
    return lambda: torch.autocast(DEVICE.type, getattr(torch, job.get("dtype", "float32")), enabled=not is_float32)


def _wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def decode(job):
    """Builds greedy `generate` with a cache and without an end of sequence."""
    model = _model(job).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.shared.weight.mul_(EMBEDDING_FACTOR)
        for block in model.decoder.block:
            block.layer[1].EncDecAttention.o.weight.mul_(CROSS_ATTENTION_FACTOR)
    sources, _ = batch(job)
    sources = torch.from_numpy(sources).long()
    inputs = {"input_ids": sources, "attention_mask": torch.ones_like(sources), "do_sample": False, "num_beams": 1,
              "max_new_tokens": job["max_length"], "min_new_tokens": job["max_length"]}

    def run():
        with torch.no_grad():
            return model.generate(**inputs)

    ids = run()[:, 1:]  # without the start token
    return run, {"parameters": sum(weight.numel() for weight in model.parameters()), "output_shape": list(ids.shape),
                 "tokens_of_a_step": tokens_of_a_step(ids), "versions": VERSIONS}


def _model(job):
    sizes = {"vocab_size": job["vocab_size"], "d_model": job["d_model"], "d_kv": job["d_kv"], "d_ff": job["d_ff"],
             "num_heads": job["heads"], "num_layers": job["layers"], "num_decoder_layers": job["layers"],
             "dropout_rate": 0.0, "tie_word_embeddings": True, "decoder_start_token_id": 0}
    if not job["experts"]:
        return transformers.T5ForConditionalGeneration(transformers.T5Config(feed_forward_proj="relu", **sizes))
    # One number for both stacks: what the encoder's sequences need.
    capacity = expert_capacity(job["encoder_length"], job["capacity_factor"], job["experts"])
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(
        num_experts=job["experts"], expert_capacity=capacity, num_sparse_encoder_layers=job["layers"] // 2,
        num_sparse_decoder_layers=job["layers"] // 2, router_jitter_noise=0.0, dense_act_fn="relu",
        router_aux_loss_coef=LOAD_BALANCING_LOSS_WEIGHT, router_z_loss_coef=ROUTER_Z_LOSS_WEIGHT, **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "router.classifier" in name:  # logits of variance 1, as in the others; its own start is d_model
                weight.normal_(0, job["d_model"] ** -0.5)
    return model
