//! The seam between octavo and Python. It converts, releases the GIL around whatever waits or computes, and maps errors;
//! it decides nothing. What is told of classes and their members here is what `help` shows, and the very words of
//! `python/octavo/_octavo.pyi`; a test compares the two.

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
mod repr; // texts as Python shows them
mod result; // finished answers
mod sampling; // the sampler alone
mod session; // conversations, and what the cache says about a prompt
mod ticket; // a call in flight
mod tokenizer; // text and token ids
mod wait; // how Python waits
mod waker; // wakes an event loop
mod watch; // events, recordings and replays

use pyo3::prelude::*;

#[pymodule]
mod _octavo {
    use pyo3::prelude::*;
    use pyo3::types::PyType;

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
        let classes = module.dict().values().try_iter()?.filter_map(|value| value.ok()?.cast_into::<PyType>().ok());
        let classes = classes.collect::<Vec<_>>();
        module.py().import("octavo._values")?.call_method1("settle", (classes,))?;
        crate::home::count_forks(module.py())
    }

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
