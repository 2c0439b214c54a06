"""Small checkpoints on disk: LLaMA-like, grouped 8 on 2, with everything that has to stay as it is."""

import hashlib
import json

import torch
from safetensors.torch import save_file

CONFIG = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
LAYER = "model.layers.{}.self_attn.{}"


def tensors(layers=2, dtype=torch.float32, seed=0, columns=64):
    """Projections with biases, a value projection, an embedding and a norm."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    made = {"model.embed_tokens.weight": random(50, columns), "model.norm.weight": random(columns)}
    for layer in range(layers):
        for name, rows in (("q_proj", 128), ("k_proj", 32), ("v_proj", 32)):
            made[LAYER.format(layer, name) + ".weight"] = random(rows, columns)
            made[LAYER.format(layer, name) + ".bias"] = random(rows)
        made[LAYER.format(layer, "o_proj") + ".weight"] = random(columns, 128)
    return made


def shaped(layers=8, layout="half", seed=0):
    """Weights whose channel norms follow the frequency, as training leaves them."""
    made = tensors(layers, seed=seed)
    pair = torch.arange(16) % 8 if layout == "half" else torch.arange(16) // 2
    strength = (0.3 * pair).exp()
    for name in made:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            made[name] = made[name] * strength.repeat(made[name].shape[0] // 16)[:, None]
    return made


def write(folder, state, config=CONFIG, metadata=None, shards=1, name="model"):
    """A folder as Hugging Face writes it, with a tokenizer beside; one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"not": "touched"}')
    names = sorted(state)
    if shards == 1:
        save_file(state, folder / f"{name}.safetensors", metadata)
        return folder
    homes = {}
    for shard in range(shards):
        file = f"{name}-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: state[key] for key in names[shard::shards]}
        save_file(part, folder / file, metadata)
        homes |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


def digest(path):
    """Of a file, or of every file of a folder by name."""
    if path.is_dir():
        return {file.name: digest(file) for file in sorted(path.iterdir())}
    return hashlib.sha256(path.read_bytes()).hexdigest()
