"""What a command says when a package can't be imported: the command that installs it, or what hides one of ours."""

from filtering.extras import EXTRA_OF, MissingExtra, install_command
from pushrep.shadowed import PACKAGES, why_hidden


def why_missing(what: str, error: ImportError) -> str | None:
    """One line; None if it is no matter of what is installed, but a mistake in the program."""
    if isinstance(error, MissingExtra):
        return str(error)
    package = (error.name or "").partition(".")[0]
    if package in PACKAGES:
        return why_hidden(package)
    if package not in EXTRA_OF and not isinstance(error, ModuleNotFoundError):
        return None
    return f"{what} needs the Python package {package!r}, which is not installed: {install_command(package)}"
