"""Base class of families whose denoisers diffusers makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ModelError
from fsdptool.families.bases.catalogue import CatalogueFamily
from fsdptool.families.bases.libraries import one_line, quiet, require_model_class
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class DiffusersFamily(CatalogueFamily):
    """Builds through ``from_config`` on whatever device is current."""

    library = "diffusers"
    default_objective = "flow_matching"

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the configuration's ``_class_name``.

        Raises:
            ModelError: It has none.
        """
        name = config.get("_class_name")
        if isinstance(name, str) and name:
            return name
        raise ModelError(
            "the configuration has no _class_name", help="set _class_name to the diffusers class of the model"
        )

    def complete(self, config: Mapping[str, Any], model_class: str) -> dict[str, Any]:
        """Return the configuration with the defaults of its class's constructor filled in."""
        parameters = signature(load_class(model_class).__init__).parameters.values()
        defaults = {item.name: item.default for item in parameters if item.default is not Parameter.empty}
        return {**{key: plain(value) for key, value in defaults.items()}, **config}

    def build(
        self,
        config: Mapping[str, Any],
        *,
        model_class: str,
        dtype: str = "float32",
        attention: str | None = None,
        folder: str | None = None,
        trust_remote_code: bool = False,
    ) -> nn.Module:
        """Build the denoiser on the current device, in training mode.

        diffusers attends through torch's SDPA unless told otherwise; ``eager`` does not exist there.

        Raises:
            ModelError: The configuration cannot be built; the message is one line.
        """
        import torch

        cls = load_class(model_class)
        raw = {key: value for key, value in config.items() if not key.startswith("_")}
        try:
            # Unknown keys are reported by the source room, with the nearest known one.
            with quiet("diffusers"):
                model = cls.from_config(raw)
        except Exception as error:
            raise ModelError(f"{model_class}: {one_line(error)}") from error
        # Past diffusers' own ``to``: it warns of modules it would rather keep in fp32, which one
        # dtype per FSDP unit does not allow (torch 2.13, ``_init_mp_dtypes``).
        built: nn.Module = torch.nn.Module.to(model, getattr(torch, dtype))
        return built.train()

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the denoiser's inputs for the recipe's sizes.

        Raises:
            ModelError: No inputs are known for the class.
        """
        raise ModelError(
            f"the inputs of {self.model_class(config)} are not known",
            help="write a family plugin for the model (docs/families.md)",
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the denoiser and return its raw prediction, in the latents' shape.

        Raises:
            ModelError: How to call the class is not known.
        """
        raise ModelError(
            f"how to call {type(model).__name__} is not known",
            help="write a family plugin for the model (docs/families.md)",
        )

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the library's objectives for denoisers."""
        from fsdptool.families.objectives import Epsilon, FlowMatching, VPrediction

        return {
            objective.name: partial(objective, denoise=self.denoise)
            for objective in (FlowMatching, Epsilon, VPrediction)
        }


def load_class(name: str) -> Any:
    """Return a diffusers class by name, importing only the module that defines it.

    Raises:
        ModelError: The class does not exist, or its module needs a package that is not installed.
    """
    import diffusers

    try:
        # diffusers loads bitsandbytes where it is installed, which remarks on CPUs' inference kernels.
        with quiet("bitsandbytes"):
            value = getattr(diffusers, name)
    except AttributeError:
        raise ModelError(f"diffusers {diffusers.__version__} has no class {name!r}") from None
    except Exception as error:
        raise ModelError(f"{name}: {one_line(error)}") from error
    return require_model_class(name, value)


def plain(value: Any) -> Any:
    """Return a default value as JSON has it."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
