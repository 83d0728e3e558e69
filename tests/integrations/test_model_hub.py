"""A model by its repo id: the real client against a small Hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub, Repo
from verify_fakes import copied

from loader.integrations.transformers import from_pretrained

pytest.importorskip("transformers", reason="Transformers is not installed")

REPOSITORY = Path(__file__).parents[2]
CODE = """
import json, sys, torch
from loader.integrations.transformers import from_pretrained
torch.set_num_threads(1)
model, report = from_pretrained(
    "own/model", revision="main", dtype="float32", output_loading_info=True
)
with torch.no_grad():
    logits = model(torch.tensor([[5, 6, 7]])).logits
print(json.dumps([report.source, logits[0, -1].tolist()]))
"""


def test_a_repo_id_gives_the_model_of_its_folder(tmp_path: Path) -> None:
    folder = copied("qwen3moe-ct-nvfp4a16", tmp_path / "repo")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    hub = Hub()
    hub.repos["own/model"] = Repo(folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {
        **kept,
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    try:
        result = subprocess.run(
            [sys.executable, "-c", CODE],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        hub.close()
    assert result.returncode == 0, result.stderr[-2000:]
    source, logits = json.loads(result.stdout.splitlines()[-1])
    local = from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        expected = local(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert source.startswith("own/model") and torch.allclose(torch.tensor(logits), expected)
    names = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert "model.safetensors" in names and "pytorch_model.bin" not in names
