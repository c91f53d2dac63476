"""The command `txnbridge doctor`, which shows settings and states that weaken a guarantee or keep back readers."""

from __future__ import annotations

from dataclasses import asdict

from txnbridge import plugins
from txnbridge.cli import _common, plugin_commands
from txnbridge.cli._common import Cli, ExitCode, exit_code
from txnbridge.errors import TxnBridgeError
from txnbridge.spi import Advice

_CODES = {"ok": ExitCode.OK, "warning": ExitCode.WARNINGS, "problem": ExitCode.FAILED}
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


@_common.command("doctor")
def command(cli: Cli) -> ExitCode:
    """Look for settings and states that weaken a promise or hold readers back.

    Exit code 0: all is well; 7: warnings; 1: a problem; 3: the broker does not answer.
    """
    findings, code = _look(cli)
    if cli.json:
        cli.document([asdict(advice) for advice in findings])
    else:
        _show(cli, findings)
    return code


def _of_plugin(name: str, error: BaseException) -> Advice:
    if name.startswith("txnbridge_") and isinstance(error, ModuleNotFoundError):
        return Advice("ok", f"plug-in {name}", f"is not used, because an extra is not installed: {error}")
    text = f"could not be loaded: {type(error).__name__}: {error}"
    return Advice("problem", f"plug-in {name}", text, "repair it, or uninstall it")


def failed_plugins() -> dict[str, BaseException]:
    """Load all plug-ins; return the errors of those that could not be loaded, by the plug-in's name."""
    plugins.backends()
    plugin_commands()
    return dict(sorted(plugins.failed.items()))


def _look(cli: Cli) -> tuple[list[Advice], ExitCode]:
    findings = [_of_plugin(name, error) for name, error in failed_plugins().items()]
    code = None
    try:
        with cli.look() as bridge:
            findings += bridge.admin.doctor()
    except TxnBridgeError as error:
        findings.append(Advice("problem", "connection", str(error)))
        code = exit_code(error)
    levels = {advice.level for advice in findings}
    worst = next((level for level in ("problem", "warning") if level in levels), "ok")
    return findings, code or _CODES[worst]


def _show(cli: Cli, findings: list[Advice]) -> None:
    from rich.text import Text

    if not findings:
        cli.say("nothing found")
        return
    rows = []
    for advice in findings:
        remedy = f" Remedy: {advice.remedy}" if advice.remedy else ""
        rows.append((Text(*_MARKS[advice.level]), advice.subject, advice.text + remedy))
    cli.table(["", "what", "finding"], rows)
