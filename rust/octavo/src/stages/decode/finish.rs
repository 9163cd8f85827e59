//! Was that the last token?

use crate::request::{Finish, StopReason, Wanted};
use crate::sequence::Sequence;

/// How a sequence ends whose rows have just been committed, if it does.
pub fn finish(sequence: &Sequence) -> Option<Finish> {
    if sequence.request.wanted != Wanted::Tokens {
        return (sequence.unread() == 0).then_some(Finish::Stop(StopReason::Complete));
    }
    let &last = sequence.generated.last()?;
    if !sequence.ends_with(last) {
        return (sequence.generated.len() >= sequence.most_new_tokens).then_some(Finish::Length);
    }
    if sequence.request.end_token_ids.contains(&last) {
        return Some(Finish::Stop(StopReason::EndToken(last)));
    }
    Some(Finish::Stop(StopReason::StopToken(last)))
}
