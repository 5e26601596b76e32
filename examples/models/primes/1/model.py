"""Counts the primes below a number in pure Python, which holds the interpreter's lock all the time."""

from moonpool import Batch, Int64, Outputs


class Primes:
    # Joining requests saves nothing here: the work is the same, row by row.
    max_batch_size = 1

    def __call__(self, LIMIT: Int64[Batch]) -> Outputs(COUNT=Int64[Batch]):
        return {"COUNT": [self.count_below(int(limit)) for limit in LIMIT]}

    @staticmethod
    def count_below(limit):
        primes = []
        for number in range(2, limit):
            for prime in primes:
                if prime * prime > number:
                    primes.append(number)
                    break
                if number % prime == 0:
                    break
            else:
                primes.append(number)
        return len(primes)
