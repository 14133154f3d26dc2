"""Makes the tiny checkpoints and expected numbers of tests/golden/hugging_face with Hugging Face's own classes.

Run by hand with torch and transformers 5.23.0 (`make golden`; torch was 2.13.0, and 2.15.0 for the tokens of
`generate`); the tests read what it wrote and need neither.
Each folder is a checkpoint as its users have it, and `expected.npz`: inputs, logits, for Switch models each router's
choices, for some the gradients of the cross-entropy. Weights are drawn at random, norms too, so that no two of them can
be mistaken for one another; heads times d_kv is not d_model, for the same reason.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
from transformers import (
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

FOLDER = pathlib.Path(__file__).with_suffix("")
VOCAB_SIZE, SIZES = 64, {
    "d_model": 16, "d_ff": 24, "d_kv": 4, "num_heads": 3, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12}
T5 = dict(vocab_size=VOCAB_SIZE, num_layers=2, num_decoder_layers=3, **SIZES)
SWITCH = dict(vocab_size=VOCAB_SIZE, num_experts=4, **SIZES)

# Two slots for each of four experts: of the 20 inputs and 12 targets of a sequence, many are dropped.
CASES = {
    "t5_1_0": (T5ForConditionalGeneration, T5Config(feed_forward_proj="relu", **T5)),
    "t5_1_1": (T5ForConditionalGeneration, T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5)),
    "switch": (SwitchTransformersForConditionalGeneration, SwitchTransformersConfig(
        num_layers=4, num_decoder_layers=2, num_sparse_encoder_layers=2, num_sparse_decoder_layers=1,
        expert_capacity=2, **SWITCH)),
    "switch_untied": (SwitchTransformersForConditionalGeneration, SwitchTransformersConfig(
        num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        expert_capacity=3, tie_word_embeddings=False, **SWITCH)),
    "switch_step_1": (SwitchTransformersForConditionalGeneration, SwitchTransformersConfig(
        num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2,
        expert_capacity=8, **SWITCH)),
    # Layers 1 and 5, where the paper's rule would say 3; no sparse layer is asked of the decoder, which gets one.
    "switch_step_4": (SwitchTransformersForConditionalGeneration, SwitchTransformersConfig(
        num_layers=8, num_decoder_layers=2, num_sparse_encoder_layers=2, num_sparse_decoder_layers=0,
        expert_capacity=2, **SWITCH)),
    "umt5": (UMT5ForConditionalGeneration, UMT5Config(**T5)),
}
# Encoders alone, with activations that no other case has.
ENCODERS = {"encoder_gelu": {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
            "encoder_silu": {"feed_forward_proj": "gated-silu"}}
# Saved with torch.save: of the first, the file lists the embedding under four names.
AS_BIN = ("t5_1_0", "switch_untied")
GRADIENTS = {
    "t5_1_0": (
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.block.2.layer.1.EncDecAttention.o.weight",
        "decoder.block.1.layer.2.layer_norm.weight"),
    "switch": (
        "encoder.block.1.layer.1.mlp.router.classifier.weight",
        "encoder.block.3.layer.1.mlp.experts.expert_2.wi.weight",
        "decoder.block.1.layer.2.mlp.experts.expert_1.wo.weight"),
}


def make_model(model_class, config, generator):
    """A model in evaluation mode with random weights of a size that keeps the logits near 1."""
    model = model_class(config).eval()
    if model_class is UMT5ForConditionalGeneration or (
            model_class is T5ForConditionalGeneration and not config.scale_decoder_outputs):
        # transformers 5 ties the logits of every new T5; those of T5 1.1 and UMT5 have weights of their own.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            random = torch.randn(weight.shape, generator=generator)
            if name.endswith("layer_norm.weight"):
                weight.copy_(1 + 0.3 * random)
            elif name == "shared.weight" or "classifier" in name or "relative_attention_bias" in name:
                weight.copy_(random)
            else:
                weight.copy_(random * weight.shape[-1] ** -0.5)
        for stack in (model.encoder, model.decoder):
            stack.embed_tokens.weight = model.shared.weight
    return model


def make_inputs():
    """Padding after, before and nowhere: Hugging Face routes padding too, and earlier tokens take the slots first."""
    random = np.random.RandomState(0)
    inputs = random.randint(2, VOCAB_SIZE, (4, 20))
    inputs[0, 13:] = 0
    inputs[1, :6] = 0
    inputs[2, 5:] = 0
    targets = random.randint(2, VOCAB_SIZE, (4, 12))
    targets[0, 9:] = 0
    targets[2, 3:] = 0
    decoder_inputs = np.concatenate([np.zeros((4, 1), targets.dtype), targets[:, :-1]], axis=1)
    return inputs, decoder_inputs, targets


def record_choices(model):
    """A list that each forward pass fills with <int>[batch, length] per router: the expert, or -1 where dropped."""
    choices = []

    def record(module, args, outputs):
        one_hot = outputs[0]
        choices.append(torch.where(one_hot.sum(-1) > 0, one_hot.argmax(-1), -1).numpy())

    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(record)
    return choices


def expected(model, gradients):
    inputs, decoder_inputs, targets = make_inputs()
    choices = record_choices(model)
    tensors = {name: torch.from_numpy(array) for name, array in (
        ("inputs", inputs), ("decoder_inputs", decoder_inputs), ("targets", targets))}
    logits = model(
        input_ids=tensors["inputs"], attention_mask=(tensors["inputs"] != 0).long(),
        decoder_input_ids=tensors["decoder_inputs"], decoder_attention_mask=(tensors["targets"] != 0).long()).logits
    labels = tensors["targets"].masked_fill(tensors["targets"] == 0, -100)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    arrays = {"inputs": inputs.astype(np.int32), "decoder_inputs": decoder_inputs.astype(np.int32),
              "targets": targets.astype(np.int32), "logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    arrays.update({f"choices/{i}": choice.astype(np.int8) for i, choice in enumerate(choices)})
    arrays.update(generated(model, tensors["inputs"]))
    weights = dict(model.named_parameters())
    arrays.update({f"gradients/{name}": weights[name].grad.numpy() for name in gradients})
    return arrays


def generated(model, inputs):
    """What the model says: greedily, <int>[batch, 12], and by four beams, <int>[batch, 4, 12], with its scores."""
    settings = {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "max_new_tokens": 12, "do_sample": False,
                "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
                # Without it, experts of a decoder would drop tokens. Theirs has as many layers as the encoder.
                "use_cache": model.config.num_decoder_layers <= model.config.num_layers}
    found = {}
    with torch.no_grad():
        found["greedy"] = model.generate(**settings)
        beams = model.generate(num_beams=4, num_return_sequences=4, length_penalty=0.0, return_dict_in_generate=True,
                               output_scores=True, **settings)
    found["beam"] = beams.sequences
    arrays = {}
    for name, ids in found.items():
        ids = ids[:, 1:].numpy().astype(np.int32)  # without the start
        is_after = np.cumsum(ids == 1, axis=1) - (ids == 1) > 0  # padded with ends or with zeros, as it comes
        arrays[name] = np.pad(np.where(is_after, 0, ids), ((0, 0), (0, 12 - ids.shape[1])))
    arrays["beam"] = arrays["beam"].reshape(len(inputs), 4, 12)
    arrays["beam_scores"] = beams.sequences_scores.numpy().reshape(len(inputs), 4)
    return arrays


def save(model, folder):
    if folder.name not in AS_BIN:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        return
    model.config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(model.config.to_diff_dict(), indent=2, sort_keys=True) + "\n")


def save_tensors_of_every_kind():
    """What the reader of pytorch_model.bin must understand, in one file."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 3
    tensors = {
        "plain": base, "transposed_view": base.T, "row_view": base[1], "parameter": torch.nn.Parameter(base + 1),
        "bfloat16": base.bfloat16(), "half": base.half(), "double": base.double(), "integers": torch.arange(3),
        "scalar": torch.tensor(2.5)}
    torch.save(tensors, FOLDER / "tensors.bin")
    np.savez(FOLDER / "tensors.npz", **{name: tensor.detach().to(torch.float32).numpy()
                                        for name, tensor in tensors.items()})


def save_encoders():
    """Encoders and their last hidden states."""
    inputs = torch.from_numpy(make_inputs()[0])
    for seed, (name, activation) in enumerate(ENCODERS.items()):
        torch.manual_seed(seed)
        model = T5EncoderModel(T5Config(vocab_size=VOCAB_SIZE, num_layers=1, **activation, **SIZES)).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                # The hidden units are near 1, where the forms of gelu differ by 1e-4.
                weight.copy_(torch.randn(weight.shape) * (1.0 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
                if key == "shared.weight":
                    weight.mul_(4)
            hidden = model(input_ids=inputs, attention_mask=(inputs != 0).long()).last_hidden_state
        model.save_pretrained(FOLDER / name)
        np.savez_compressed(FOLDER / name / "expected.npz", inputs=inputs.numpy().astype(np.int32),
                            hidden=hidden.numpy())


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, (model_class, config)) in enumerate(CASES.items()):
        model = make_model(model_class, config, torch.Generator().manual_seed(seed))
        save(model, FOLDER / name)
        arrays = expected(model, GRADIENTS.get(name, ()))
        np.savez_compressed(FOLDER / name / "expected.npz", **arrays)
        sparse = [[i for i, block in enumerate(stack.block) if getattr(block, "is_sparse", False)]
                  for stack in (model.encoder, model.decoder)]
        dropped = [float((array < 0).mean()) for key, array in arrays.items() if key.startswith("choices/")]
        print(f"{name}: logits {arrays['logits'].std():.2f}, sparse layers {sparse}, dropped {np.round(dropped, 2)}")
    save_tensors_of_every_kind()
    save_encoders()


if __name__ == "__main__":
    main()
