"""The one exception that the command line turns into a sentence instead of a traceback."""


class UserError(Exception):
    """Something the user can put right: the message says what is wrong and what to do, in one sentence.

    Library code raises it where the bad value enters; `perilune.cli` prints the message and exits with status 2.
    """
