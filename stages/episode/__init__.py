"""Episodes: samples of several turns, of a policy with an environment or a program."""
