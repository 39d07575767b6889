"""`pomona llama-server`: llama.cpp's server from the `pomona[llama]` wheel, with llama-server's own arguments."""

import sys

import click


@click.command("llama-server", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run llama.cpp's server. ARGUMENTS are arguments of llama-server; --help lists the supported ones."""
    try:
        from runtimes import llama_launcher  # noqa: PLC0415 - the extra may be missing, and the error says how to install it
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error}: pip install '.[llama]' in a checkout of Pomona, or install llama-server itself"
        ) from error
    sys.exit(llama_launcher.main(arguments))
