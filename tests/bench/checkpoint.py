"""One checkpoint in each form that a server wants: GGUF in one precision, and a Hugging Face folder in bfloat16."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
from gguf.quants import dequantize, quantize

_TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0}


def write_gguf(source: Path, target: Path, precision: str) -> Path:
    """`source` with its weights in `precision`; whatever is not a matrix stays float32. Kept between runs."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(_FILE_TYPES[precision])
    wanted = _TYPES[precision]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = wanted if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = values.astype("float32") if kind == gguf.GGMLQuantizationType.F32 else quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load_reference(source: Path) -> Any:
    """The model in transformers, float32: what the others' answers are judged by."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)


def write_folder(source: Path, target: Path) -> Path:
    """`source` as a Hugging Face folder with bfloat16 safetensors and its tokenizer. Kept between runs."""
    if (target / "tokenizer_config.json").exists():
        return target
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    target.mkdir(exist_ok=True)
    model = load_reference(source)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # it names the file that was read; what is written is plain bfloat16
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, default=str))
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(target)
    return target
