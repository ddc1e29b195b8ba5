"""A model without its last layers, as a draft model of the whole one."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def save_shortened(source: Path, folder: Path, layers: int) -> Path:
    """Saves the first `layers` layers of the model at `source` to `folder`, which it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    tensors = {
        name: tensor
        for path in source.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
