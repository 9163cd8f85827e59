//! One token at a time.

mod advance; // everybody who speaks keeps speaking
mod finish; // was that the last token
mod preempt; // give the blocks back, come again later

pub use advance::advance;
pub use finish::finish;
pub use preempt::preempt;
