"""Entry of the `infsim` command: exit 0 done, 1 a run failed, 2 wrong usage or input (one line on stderr)."""

import sys

from perfmodel.errors import InputError, RunError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; `arguments` default to the process's own. Returns the exit code."""
    from infsim.cli import app

    try:
        return int(app(args=arguments, prog_name="infsim", standalone_mode=False) or 0)
    except InputError as error:
        return complain(str(error), 2)
    except RunError as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return complain("interrupted; the same command resumes", 130)
    except BrokenPipeError:  # the reader of a pipe has gone: `infsim list keys | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's usage errors, whichever click it brings
            raise
        return complain(error.format_message(), 2)


def complain(message: str, code: int) -> int:
    line = " ".join(message.split()) if code == 2 else message
    print(f"infsim: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
