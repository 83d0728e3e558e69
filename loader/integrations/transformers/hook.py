"""Hook: Transformers' own extension point between building a model on meta and loading its weights.

The only module of the library that imports Transformers; it is imported when a model is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from loader.errors import UnsupportedError
from loader.integrations.transformers.values import Unread

METHOD = "qpn"
_OWN_QUANTIZATION = "quantization_config"


@register_quantization_config(METHOD)
class PreparedConfig(QuantizationConfigMixin):
    """What stands in a model's config in the place of the checkpoint's quantization.

    ``prepare`` is called with the model on meta, before a weight is read.
    """

    def __init__(self, prepare: Callable[[Any], None]) -> None:
        self.quant_method = METHOD
        self.prepare: Callable[[Any], None] | None = prepare

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        """What a saved config says: that the weights are prepared."""
        return {"quant_method": self.quant_method}


@register_quantizer(METHOD)
class PreparedQuantizer(HfQuantizer):
    """Calls :attr:`PreparedConfig.prepare`; what it leaves on the model is for inference only."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        prepare, self.quantization_config.prepare = self.quantization_config.prepare, None
        # The model is being built under a default device of meta.
        with torch.device("cpu"):
            prepare(model)

    def is_serializable(self) -> bool:
        """Prepared banks are no checkpoint that Transformers could load again."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No gradient flows through prepared banks."""
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        """What ``model.dequantize()`` calls: the base says that it is not implemented."""
        raise UnsupportedError(
            "a model of prepared banks is not turned into plain weights",
            expected="dequantize(expert) of one PreparedExperts, or the checkpoint loaded by "
            "Transformers alone",
            found=f"dequantize() of {type(model).__name__}",
        )

    @property
    def is_compileable(self) -> bool:
        """Every prepared module is one operator with a fake implementation."""
        return True


def config_of(values: Mapping[str, Any]) -> Any:
    """The config object of a parsed ``config.json``, without the checkpoint's own quantization.

    Raises :class:`UnsupportedError` for a model type that this Transformers does not know.
    """
    own = copy.deepcopy(dict(values))
    for place in (own, own.get("text_config")):
        if isinstance(place, dict):
            place.pop(_OWN_QUANTIZATION, None)
    kind = own.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            "Transformers does not know this model",
            file="config.json",
            expected="a model_type of the installed Transformers "
            f"({transformers.__version__}); a newer one may know it, code from the checkpoint "
            "is never run",
            found=repr(kind),
        )
    return transformers.CONFIG_MAPPING[kind].from_dict(own)


def class_of(config: Any) -> Any:
    """The model class that the config names, else the causal language model of its type."""
    for name in config.architectures or ():
        found = vars(transformers).get(name) or _exported(name)
        if found is not None:
            return found
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        return mapping[type(config)]
    raise UnsupportedError(
        "Transformers has no class for this model",
        file="config.json",
        expected=f"architectures that Transformers {transformers.__version__} has",
        found=repr(config.architectures),
    )


def _exported(name: str) -> Any:
    try:
        return transformers.__getattr__(name)
    except AttributeError:
        return None


class Names:
    """Transformers' own way from a name in the checkpoint to a name in its model."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._own = model.state_dict()

    def __call__(self, name: str) -> tuple[str | None, bool]:
        """The model's name of a checkpoint tensor, and whether it is stored there as it is.

        None where the model has no such tensor; False where Transformers computes what it stores.
        """
        for renamings, converters in ((self._renamings, self._converters), ([], [])):
            renamed, pattern = rename_source_key(
                name, renamings, converters, self._prefix, self._own
            )
            if renamed in self._own:
                return renamed, pattern is None
        return None, True


def build(
    cls: Any,
    config: Any,
    values: Mapping[str, Unread],
    dtype: torch.dtype,
    device: torch.device,
    prepare: Callable[[Any], None],
) -> tuple[Any, dict[str, Any]]:
    """The model with the weights in ``values``, and Transformers' own account of the loading.

    ``values`` may be filled by ``prepare``, which gets the model on meta.
    """
    where = {} if device.type == "cpu" else {"device_map": {"": device}}
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=values,
        dtype=dtype,
        quantization_config=PreparedConfig(prepare),
        output_loading_info=True,
        **where,
    )
    return model, info


def set_generation_config(model: Any, values: Mapping[str, Any]) -> None:
    """Give the model the settings of a parsed ``generation_config.json``."""
    if model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_dict(dict(values))


def kept_in_fp32(model: Any, dtype: torch.dtype) -> list[str]:
    """Parts of names whose tensors Transformers keeps in fp32 under ``dtype``."""
    strict = model._keep_in_fp32_modules_strict or ()
    only_fp16 = model._keep_in_fp32_modules or ()
    kept = [*strict] if dtype in (torch.float16, torch.bfloat16) else []
    return [*kept, *only_fp16] if dtype == torch.float16 else kept
