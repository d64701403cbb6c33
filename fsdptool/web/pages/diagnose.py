"""Why a run failed, from a pasted log, a file or a run folder; and findings in a pasted configuration."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.config.migrate import repair
from fsdptool.config.result import Reading
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import is_folder
from fsdptool.records.diagnosis import Allocation, FailureDiagnosis
from fsdptool.report.console.runs import (
    allocation_change,
    allocation_lines,
    divergence_lines,
    facts_lines,
    failure_place,
)
from fsdptool.report.console.train import memory_text
from fsdptool.runs.allocations import explain_allocation
from fsdptool.runs.diagnose import diagnose
from fsdptool.runs.logs import LogText
from fsdptool.runs.recognition import diagnose_logs
from fsdptool.web import references
from fsdptool.web.judging import judge_text
from fsdptool.web.page import Page, render, services
from fsdptool.web.pages.config_file import attachment
from fsdptool.web.pages.configs import FILE
from fsdptool.web.source_view import address_of, command_path, diff_lines, effective_rows, source_view

page = Page(
    "Diagnose", "/diagnose", "Paste a log or a configuration: the cause of a failure, and what to change."
)
DOWNLOAD = "/diagnose/download"
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_PASTED = "pasted text"


class PastedTexts:
    """Texts that were pasted, by their digest, so that an address can name them. The oldest go first.

    Args:
        most_bytes: Size of all texts together.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._most = most_bytes
        self._lock = threading.Lock()

    def keep(self, text: str) -> str:
        """Keep a text and return its name."""
        name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        with self._lock:
            self._texts[name] = text
            self._texts.move_to_end(name)
            while len(self._texts) > 1 and sum(map(len, self._texts.values())) > self._most:
                self._texts.popitem(last=False)
        return name

    def get(self, name: str) -> str:
        """Return a text.

        Raises:
            ConfigError: It is no longer stored.
        """
        with self._lock:
            text = self._texts.get(name)
        if text is None:
            raise ConfigError("the pasted text is no longer stored", help="paste it again")
        return text


_TEXTS = PastedTexts()


async def show(request: Request) -> Response:
    """Return the page, with the answer for what the address names; or keep what was pasted."""
    if request.method == "POST":
        return await _keep(request)
    return await run_in_threadpool(_page, request)


async def _keep(request: Request) -> Response:
    form = await request.form()
    text = form.get("text", "")
    upload = form.get("log")
    if isinstance(upload, UploadFile) and upload.size:
        text = (await upload.read()).decode("utf-8", errors="replace")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("the text is empty", help="paste a log or a configuration, or choose a file")
    # Browsers send the lines of a text area with CR LF.
    return RedirectResponse(address_of(page.path, text=_TEXTS.keep(text.replace("\r\n", "\n"))), 303)


def _page(request: Request) -> Response:
    query = request.query_params
    target, name = query.get("target", "").strip(), query.get("text", "")
    if target:
        return _of_path(request, target)
    if not name:
        return _render(request, target="")
    text = _TEXTS.get(name)
    reading = judge_text(text)
    if reading.dialect is not None:
        return _render(request, target="", text=text, **_configuration(reading, name, query.get("fix", "")))
    size = len(text.encode("utf-8", "surrogatepass"))
    answer = diagnose_logs(_PASTED, (LogText(_PASTED, text.replace("\r", "\n"), size, size),))
    command = ("fsdptool", "diagnose", "-")
    return _explained(request, answer, command, target="", text=text, name=name)


def _of_path(request: Request, target: str) -> Response:
    roots = services(request).roots
    path = roots.resolve(target)
    if is_folder(path):
        roots.check_links(path)
    elif path.suffix.lower() in _CONFIGS:
        return RedirectResponse(address_of(FILE, file=roots.name_of(path)), 303)
    with roots.confine():
        answer = diagnose(path)
    return _explained(request, answer, ("fsdptool", "diagnose", command_path(path)), target=target)


def _explained(
    request: Request, answer: FailureDiagnosis, command: tuple[str, ...], *, target: str, **values: Any
) -> Response:
    """Return the page of a diagnosis, whose failed allocation the given file or model explains."""
    given = {key: request.query_params.get(key, "").strip() for key in ("config", "model")}
    mistake = ""
    if any(given.values()):
        try:
            allocation, flags = _allocation(request, answer, **given)
            answer, command = replace(answer, allocation=allocation), (*command, *flags)
        except FsdptoolError as error:
            mistake = f"{error.message}. {error.help or ''}".strip()
    asked = any(item.requested is not None for item in answer.failures)
    return _render(
        request,
        target=target,
        command=command,
        given=given,
        asked=asked,
        mistake=mistake,
        **values,
        **_failure(answer),
    )


def _allocation(
    request: Request, answer: FailureDiagnosis, *, config: str, model: str
) -> tuple[Allocation, tuple[str, ...]]:
    """Return what a failed allocation is by a file or a model, and the options that say the same."""
    roots = services(request).roots
    file = roots.resolve(config) if config else None
    reference = references.allowed(roots, model) if model else None
    with roots.confine():
        found = explain_allocation(answer, file, reference)
    flags = ("--config", command_path(file)) if file is not None else ()
    return found, (*flags, *(("--model", model) if model else ()))


def _failure(answer: FailureDiagnosis) -> dict[str, Any]:
    """Return what the template shows of a diagnosis."""
    return {
        "diagnosis": answer,
        "causes": [item for item in answer.failures if not item.consequence],
        "consequences": [item for item in answer.failures if item.consequence],
        "facts": facts_lines(answer.facts) if answer.facts is not None else (),
        "divergence": divergence_lines(answer.divergence) if answer.divergence is not None else (),
        "memory": memory_text(answer.memory) if answer.memory is not None else "",
        "allocation": allocation_lines(answer.allocation) if answer.allocation is not None else (),
        "smaller": allocation_change(answer.allocation) if answer.allocation is not None else None,
    }


def _configuration(reading: Reading, name: str, fix: str) -> dict[str, Any]:
    """Return what the template shows of a pasted configuration."""
    fixed = _fixed(reading, fix) if fix in ("safe", "unsafe") else None
    flag = {"safe": ("--fix",), "unsafe": ("--unsafe-fixes",)}.get(fix, ())
    safe = [item.fix.safe for item in reading.diagnostics if item.fix is not None]
    offers = (
        ("safe", "Show all safe fixes", True in safe),
        ("unsafe", "Show all fixes, also those that change the run", False in safe),
    )
    assert reading.source is not None
    return {
        "reading": reading,
        "view": source_view(reading),
        "settings": effective_rows(reading),
        "fixes": [
            (label, address_of(page.path, text=name, fix=kind) + "#change")
            for kind, label, offered in offers
            if offered
        ],
        "changed_lines": diff_lines(reading.source, fixed, _PASTED) if fixed is not None else (),
        "fix": fix if fixed is not None else "",
        "download": address_of(DOWNLOAD, text=name, fix=fix),
        "command": ("fsdptool", "validate", *flag, "accelerate.yaml"),
    }


def _fixed(reading: Reading, fix: str) -> str:
    return repair(reading, unsafe=fix == "unsafe").after.text


def _render(request: Request, *, target: str, **values: Any) -> Response:
    empty: dict[str, Any] = {"text": "", "name": "", "diagnosis": None, "reading": None, "command": ()}
    return render(
        request, "diagnose.html", page=page, target=target, place=failure_place, **{**empty, **values}
    )


def download(request: Request) -> Response:
    """Return a pasted configuration with its fixes as a file."""
    reading = judge_text(_TEXTS.get(request.query_params.get("text", "")))
    if reading.dialect is None:
        raise ConfigError("the pasted text is not a configuration", help="paste a configuration")
    return attachment(_fixed(reading, request.query_params.get("fix", "")), "fixed.yaml")


routes = [Route(page.path, show, methods=["GET", "POST"]), Route(DOWNLOAD, download)]
