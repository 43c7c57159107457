"""Profile a machine, run on it, simulate it, compare: `cases` what is run, `commands` the steps, `page` what is written of it."""
