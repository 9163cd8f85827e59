//! A request as bytes. Every field is named, in both directions: one that is added later is missed by the compiler.

use std::io::Read;
use std::sync::Arc;

use super::wire::{Found, In, Out, wrong};
use crate::request::{Constraint, Request, RequestId, SamplingParams, SessionId, Time, Wanted};

/// What requests share with the one before (the choices of a call do): it is written once.
#[derive(Debug, Default)]
pub struct Shared {
    prompt: Arc<[u32]>,
    params: Option<Arc<SamplingParams>>,
}

/// Appends a request.
pub fn write(out: &mut Out, request: &Request, shared: &mut Shared) {
    let Request {
        id,
        call,
        prompt,
        params,
        wanted,
        seed,
        end_token_ids,
        guide: _, // follows from the parameters
        priority,
        deadline,
        cache_salt,
        session,
        user,
        arrived,
    } = request;
    out.u64(id.0);
    out.u64(call.0);
    let known = Arc::ptr_eq(prompt, &shared.prompt);
    out.bool(known);
    if !known {
        out.ids(prompt);
        shared.prompt = prompt.clone();
    }
    let known = shared.params.as_ref().is_some_and(|known| Arc::ptr_eq(known, params));
    out.bool(known);
    if !known {
        write_params(out, params);
        shared.params = Some(params.clone());
    }
    match *wanted {
        Wanted::Tokens => out.u64(0),
        Wanted::LastLogits => out.u64(1),
        Wanted::AllLogits => out.u64(2),
        Wanted::Scores { from } => out.u64(2 + from as u64),
    }
    out.u64(*seed);
    out.ids(end_token_ids);
    out.i32(*priority);
    out.option(deadline.as_ref(), |out, deadline| out.u64(deadline.0));
    out.option(cache_salt.as_deref(), Out::text);
    out.option(session.as_ref(), |out, session| out.u64(session.0));
    out.text(user);
    out.u64(arrived.0);
}

/// Reads a request for a vocabulary of `vocab` tokens, and checks it as the door does.
pub fn read<R: Read>(found: &mut In<R>, shared: &mut Shared, vocab: usize) -> Found<Request> {
    let (id, call) = (RequestId(found.u64()?), RequestId(found.u64()?));
    if !found.bool()? {
        shared.prompt = found.ids()?.into();
    }
    if !found.bool()? {
        let params = read_params(found)?;
        params.validate(vocab).or_else(|why| wrong(format!("{id}: {why}")))?;
        shared.params = Some(Arc::new(params));
    }
    let (prompt, Some(params)) = (shared.prompt.clone(), shared.params.clone()) else {
        return wrong(format!("{id} has the parameters of the one before, and there is none"));
    };
    let wanted = match found.usize()? {
        0 => Wanted::Tokens,
        1 => Wanted::LastLogits,
        2 => Wanted::AllLogits,
        more => Wanted::Scores { from: more - 2 },
    };
    let request = Request {
        id,
        call,
        prompt,
        params,
        wanted,
        seed: found.u64()?,
        end_token_ids: found.ids()?.into(),
        guide: None,
        priority: found.i32()?,
        deadline: found.option(In::u64)?.map(Time),
        cache_salt: found.option(In::text)?.map(Into::into),
        session: found.option(In::u64)?.map(SessionId),
        user: found.text()?.into(),
        arrived: Time(found.u64()?),
    };
    if let Some(token) = request.prompt.iter().chain(&*request.end_token_ids).find(|&&token| token as usize >= vocab) {
        return wrong(format!("{id} has token {token}, the vocabulary has {vocab}"));
    }
    if let Wanted::Scores { from } = wanted
        && !(1..request.prompt.len()).contains(&from)
    {
        return wrong(format!("{id} wants scores from token {from} on, its prompt has {}", request.prompt.len()));
    }
    Ok(request)
}

fn write_params(out: &mut Out, params: &SamplingParams) {
    let SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        max_tokens,
        min_tokens,
        stop,
        stop_token_ids,
        include_stop_str_in_output,
        ignore_eos,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        logit_bias,
        bad_words,
        allowed_token_ids,
        logprobs,
        prompt_logprobs,
        skip_special_tokens,
        constraint,
    } = params;
    for value in [temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty] {
        out.f32(*value);
    }
    out.u64((*top_k).into());
    out.usize(*max_tokens);
    out.usize(*min_tokens);
    out.list(stop, |out, stop| out.text(stop));
    out.ids(stop_token_ids);
    for flag in [include_stop_str_in_output, ignore_eos, skip_special_tokens] {
        out.bool(*flag);
    }
    out.option(*seed, Out::u64);
    out.list(logit_bias, |out, &(id, bias)| {
        out.u64(id.into());
        out.f32(bias);
    });
    out.list(bad_words, |out, word| out.ids(word));
    out.option(allowed_token_ids.as_deref(), Out::ids);
    out.option(*logprobs, Out::usize);
    out.option(*prompt_logprobs, Out::usize);
    match constraint {
        None => out.byte(0),
        Some(Constraint::JsonSchema(text)) => write_grammar(out, 1, text),
        Some(Constraint::Regex(text)) => write_grammar(out, 2, text),
        Some(Constraint::Lark(text)) => write_grammar(out, 3, text),
        Some(Constraint::Choice(texts)) => {
            out.byte(4);
            out.list(texts, |out, text| out.text(text));
        }
    }
}

fn write_grammar(out: &mut Out, kind: u8, text: &str) {
    out.byte(kind);
    out.text(text);
}

fn read_params<R: Read>(found: &mut In<R>) -> Found<SamplingParams> {
    // In the order in which they were written.
    Ok(SamplingParams {
        temperature: found.f32()?,
        top_p: found.f32()?,
        min_p: found.f32()?,
        presence_penalty: found.f32()?,
        frequency_penalty: found.f32()?,
        repetition_penalty: found.f32()?,
        top_k: found.u32()?,
        max_tokens: found.usize()?,
        min_tokens: found.usize()?,
        stop: found.list(In::text)?,
        stop_token_ids: found.ids()?,
        include_stop_str_in_output: found.bool()?,
        ignore_eos: found.bool()?,
        skip_special_tokens: found.bool()?,
        seed: found.option(In::u64)?,
        logit_bias: found.list(|found| Ok((found.u32()?, found.f32()?)))?,
        bad_words: found.list(In::ids)?,
        allowed_token_ids: found.option(In::ids)?,
        logprobs: found.option(In::usize)?,
        prompt_logprobs: found.option(In::usize)?,
        constraint: read_constraint(found)?,
    })
}

fn read_constraint<R: Read>(found: &mut In<R>) -> Found<Option<Constraint>> {
    Ok(match found.byte()? {
        0 => None,
        1 => Some(Constraint::JsonSchema(found.text()?)),
        2 => Some(Constraint::Regex(found.text()?)),
        3 => Some(Constraint::Lark(found.text()?)),
        4 => Some(Constraint::Choice(found.list(In::text)?)),
        other => return wrong(format!("there is no grammar of kind {other}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(params: &Arc<SamplingParams>, prompt: &Arc<[u32]>, wanted: Wanted) -> Request {
        Request {
            id: RequestId(3),
            call: RequestId(1),
            prompt: prompt.clone(),
            params: params.clone(),
            wanted,
            seed: u64::MAX,
            end_token_ids: [2, 7].into(),
            guide: None,
            priority: -5,
            deadline: Some(Time(1 << 40)),
            cache_salt: Some("tenant".into()),
            session: Some(SessionId(9)),
            user: "ada".into(),
            arrived: Time(77),
        }
    }

    #[test]
    fn everything_is_read_back_and_what_is_shared_is_written_once() {
        let params = |constraint| SamplingParams {
            stop: vec!["a".into(), "b\n".into()],
            stop_token_ids: vec![1, 2],
            seed: Some(9),
            logit_bias: vec![(5, -1.5)],
            bad_words: vec![vec![1, 2], vec![3]],
            allowed_token_ids: Some(vec![4, 5]),
            logprobs: Some(0),
            prompt_logprobs: Some(3),
            constraint,
            ..SamplingParams::default()
        };
        let all = [
            params(None),
            SamplingParams::default(),
            params(Some(Constraint::Regex("a+".into()))),
            params(Some(Constraint::Choice(vec!["x".into(), "y".into()]))),
            params(Some(Constraint::JsonSchema("{}".into()))),
            params(Some(Constraint::Lark("start: \"x\"".into()))),
        ];
        let prompt: Arc<[u32]> = (0..100).collect();
        let wanted = [Wanted::Tokens, Wanted::LastLogits, Wanted::AllLogits, Wanted::Scores { from: 1 }];
        let (mut out, mut written, mut read_so_far) = (Out::default(), Shared::default(), Shared::default());
        let mut requests = Vec::new();
        for params in all {
            let params = Arc::new(params);
            requests.extend(wanted.map(|wanted| request(&params, &prompt, wanted)));
        }
        let mut sizes = Vec::new();
        for request in &requests {
            let before = out.0.len();
            write(&mut out, request, &mut written);
            sizes.push(out.0.len() - before);
        }
        assert!(sizes[0] > 150 && sizes[1] < 50, "{sizes:?}");
        let mut found = In::new(&out.0[..], out.0.len() as u64);
        for request in &requests {
            let again = read(&mut found, &mut read_so_far, 1000).expect("what was written");
            assert_eq!(format!("{again:?}"), format!("{request:?}"));
        }
        let refused = read(&mut In::new(&out.0[..], out.0.len() as u64), &mut Shared::default(), 50);
        assert!(refused.unwrap_err().to_string().contains("vocabulary"));
    }
}
