"""What the commands of this package share. Stdlib alone."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Wrong usage is one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")
