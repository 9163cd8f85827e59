//! The seam between octavo and Python. It converts, releases the GIL around whatever waits or computes, and maps errors;
//! it decides nothing. The user's documentation of these classes is in `python/octavo/_octavo.pyi`.

mod anatomy; // where a request's time and memory went
mod chunk; // pieces of answers, and log-probabilities
mod engine; // a loaded model
mod errors; // Rust's errors as Python's
mod facts; // what was fixed at load, and counters
mod fields; // reads named values of Python objects
mod home; // values that live in one process only
mod machine; // what a file holds, what a machine offers
mod params; // settings and parameters of a call
mod prompt; // text, messages or token ids
mod result; // finished answers
mod sampling; // the sampler alone
mod session; // conversations, and what the cache says about a prompt
mod ticket; // a call in flight
mod tokenizer; // text and token ids
mod waker; // wakes an event loop
mod watch; // events, recordings and replays

use pyo3::prelude::*;

#[pymodule]
mod _octavo {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::anatomy::{Anatomy, Preemption};
    #[pymodule_export]
    use crate::chunk::{Chunk, TokenLogprobs};
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::facts::{Facts, Stats};
    #[pymodule_export]
    use crate::machine::{Inspection, Machine, inspect, machine};
    #[pymodule_export]
    use crate::prompt::Chat;
    #[pymodule_export]
    use crate::result::{Choice, RequestResult, Usage};
    #[pymodule_export]
    use crate::sampling::{sample, sampling_probabilities};
    #[pymodule_export]
    use crate::session::{CacheExplanation, SessionEvent, SessionHandle, SessionReport};
    #[pymodule_export]
    use crate::ticket::{Chunks, Ticket};
    #[pymodule_export]
    use crate::tokenizer::{Encoding, Tokenizer};
    #[pymodule_export]
    use crate::waker::Waker;
    #[pymodule_export]
    use crate::watch::{Event, Events, Recording, Replay, replay};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::home::count_forks(module.py())
    }

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
