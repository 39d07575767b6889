"""`pomona`: one command for people. Each sub-command's world is imported only when it runs, so that help is quick."""

from importlib.metadata import version

import click

from cli.lazy import LazyGroup

SUBCOMMANDS = {
    "agent": ("metal agent of an off-cluster host: serve models as native processes", "cli.agent"),
    "controller": ("controller of the cluster: run Models and InferenceServices", "cli.controller"),
    "fetch": ("fetch weights, resumed after a cut and verified", "cli.fetch"),
    "inspect": ("read what the header of a model says, without fetching the model", "cli.inspect"),
    "llama-server": ("llama.cpp's server from the wheel, with llama-server's own arguments", "cli.llama_server"),
    "up": ("serve models on this machine alone, without a cluster", "cli.up"),
    "proxy": ("data plane of a host, started by its agent", "cli.proxy"),
}
"""Name, one line for people, and the module whose `command` it is."""


@click.group(cls=LazyGroup, subcommands=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("pomona"), prog_name="pomona")
def main() -> None:
    """Serve large language models on the hardware you own: Kubernetes pods and off-cluster hosts, one API.

    \b
    Examples:
      pomona up --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona inspect hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona controller --kubeconfig ~/.kube/config
      pomona agent --name studio-1 --kubeconfig ~/.pomona/kubeconfig
    """


if __name__ == "__main__":
    main()
