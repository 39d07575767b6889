"""`pomona`: one command for people. Each sub-command's world is imported only when it runs, so that help is quick."""

import importlib
from importlib.metadata import version

import click

SUBCOMMANDS = {
    "agent": ("metal agent of an off-cluster host: serve models as native processes", "cli.agent"),
    "controller": ("controller of the cluster: run Models and InferenceServices", "cli.controller"),
    "fetch": ("fetch weights, resumed after a cut and verified", "cli.fetch"),
    "inspect": ("read what a GGUF file says of itself, without fetching it", "cli.inspect"),
    "llama-server": ("llama.cpp's server from the wheel, with llama-server's own arguments", "cli.llama_server"),
    "proxy": ("data plane of a host, started by its agent", "cli.proxy"),
}
"""Name, one line for people, and the module whose `command` it is."""

EXTRAS = {"kopf": "controller", "xllamacpp": "llama"}
"""Modules that the base install lacks, and the extra that brings each."""


class LazyGroup(click.Group):
    """Lists sub-commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names that `--help` shows."""
        del ctx
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one sub-command that is asked for.

        Raises:
            click.ClickException: it needs an extra that is not installed.
        """
        del ctx
        if cmd_name not in SUBCOMMANDS:
            return None
        try:
            command = importlib.import_module(SUBCOMMANDS[cmd_name][1]).command
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            raise click.ClickException(
                f"{cmd_name} needs what the extra {EXTRAS[error.name]} brings: "
                f"pip install 'pomona[{EXTRAS[error.name]}]'"
            ) from error
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show each line from the table, so that help imports nothing."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (line, _) in sorted(SUBCOMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("pomona"), prog_name="pomona")
def main() -> None:
    """Serve large language models on the hardware you own: Kubernetes pods and off-cluster hosts, one API.

    \b
    Examples:
      pomona inspect hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona controller --kubeconfig ~/.kube/config
      pomona agent --name studio-1 --kubeconfig ~/.pomona/kubeconfig
    """


if __name__ == "__main__":
    main()
