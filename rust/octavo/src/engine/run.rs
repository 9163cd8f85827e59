//! The loop: commands in, one batch, events out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use super::mailbox::Touched;
use super::outlet::{Outlet, Outlets};
use super::shared::{CLOSED, EngineStats, Message, Shared, StepTime};
use crate::execute::Executor;
use crate::observe::readers::Readers;
use crate::observe::record::{Header, Recorder};
use crate::request::Time;
use crate::schedule::{Command, Event, Scheduler, Unseen};

/// Everything the engine thread owns.
pub(super) struct Runner {
    pub scheduler: Scheduler,
    pub executor: Box<dyn Executor>,
    pub inbox: Receiver<Message>,
    pub shared: Arc<Shared>,
    pub outlets: Outlets,
    /// Whom this step has brought something.
    pub touched: Touched,
    /// Requests that have arrived since the load was published.
    pub seen: Unseen,
    /// Whether whoever was heard last has more to send at once.
    pub more: bool,
    /// What the steps so far took.
    pub time: StepTime,
    /// Writes down what the scheduler is told and what it decides, if somebody wants that.
    pub recorder: Option<Recorder>,
    /// Whom to tell what happens.
    pub readers: Readers,
}

/// Whether the loop goes on.
#[derive(PartialEq)]
enum Flow {
    On,
    Closed,
}

impl Runner {
    /// Runs until closed. Whatever happens, every request ends: a panic (our own mistake) or a failing device ends them
    /// with an error, and the engine with them.
    pub fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let reason = match self.until_closed() {
                Ok(()) => CLOSED.to_owned(),
                Err(failure) => {
                    self.shared.device_failed.store(true, Ordering::Release);
                    format!("the engine stopped: {failure}")
                }
            };
            self.shared.close(&reason);
            self.scheduler.fail_all(&reason, self.shared.now());
            self.deliver();
        }));
        if let Err(panic) = outcome {
            self.shared.close(&format!("the engine stopped on an internal error: {}", panic_text(&*panic)));
        }
        // Those that had ended when it panicked; what is left, here or in the inbox, ends as it is dropped (see `Outlet`).
        self.touched.tell();
        self.finish_recording();
    }

    /// The engine is about to end, and perhaps the process: what was recorded has to be in the file first.
    fn finish_recording(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            let recording = recorder.recording();
            drop(recorder);
            // Whoever holds the recording learns of an error there.
            let _ = recording.ended_within(PATIENCE_OF_DISK);
        }
    }

    fn until_closed(&mut self) -> Result<(), String> {
        loop {
            if self.drain() == Flow::Closed || self.gather() == Flow::Closed {
                return Ok(());
            }
            if !self.step()? && self.wait() == Flow::Closed {
                return Ok(());
            }
        }
    }

    /// One step. `false`: there was nothing to compute.
    fn step(&mut self) -> Result<bool, String> {
        let begun = self.shared.now();
        let batch = self.scheduler.schedule(begun);
        if let Some(recorder) = &mut self.recorder {
            recorder.planned(batch.as_ref(), begun);
        }
        self.publish();
        let computed = match batch {
            None => false,
            Some(batch) => {
                // Who has ended before this step hears of it before this step.
                self.deliver();
                let begun = self.shared.now();
                self.executor.launch(&batch)?;
                let output = self.executor.collect()?;
                let now = self.shared.now();
                self.time.executor_ns += now.since(begun);
                if let Some(recorder) = &mut self.recorder {
                    recorder.committed(&output, now);
                }
                self.scheduler.commit(batch, output, now);
                true
            }
        };
        self.deliver();
        if let Some(recorder) = &mut self.recorder {
            recorder.flush();
        }
        if computed {
            self.time.steps_ns += self.shared.now().since(begun);
        }
        Ok(computed)
    }

    fn publish(&mut self) {
        self.shared.publish(self.scheduler.load(), std::mem::take(&mut self.seen));
    }

    /// Applies the commands that have arrived, up to a number: whoever asks all the time holds nobody up who is answered.
    fn drain(&mut self) -> Flow {
        for _ in 0..MOST_MESSAGES {
            let flow = match self.inbox.try_recv() {
                Ok(message) => self.apply(message),
                Err(TryRecvError::Empty) => return Flow::On,
                Err(TryRecvError::Disconnected) => Flow::Closed,
            };
            if flow == Flow::Closed {
                return flow;
            }
        }
        Flow::On
    }

    /// Waits for what somebody is sending, if nobody runs: what comes together begins together. Else the first would begin
    /// alone, and the others' prompts were read beside an answer that they must not hold up.
    fn gather(&mut self) -> Flow {
        let begun = self.shared.now();
        while self.more && self.scheduler.could_do_more() {
            let left = GATHERING.saturating_sub(Duration::from_nanos(self.shared.now().since(begun)));
            if left.is_zero() {
                break;
            }
            let flow = match self.inbox.recv_timeout(left) {
                Ok(message) => self.apply(message),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => Flow::Closed,
            };
            if flow == Flow::Closed {
                return flow;
            }
        }
        self.more = false;
        Flow::On
    }

    /// Sleeps until a command arrives, or what a session keeps is due. (Nothing else can bring work: a living request
    /// always has something to run.)
    fn wait(&mut self) -> Flow {
        let received = match self.scheduler.next_expiry() {
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => self.inbox.recv_timeout(Duration::from_nanos(due.since(self.shared.now()))),
        };
        match received {
            Ok(message) => self.apply(message),
            Err(RecvTimeoutError::Timeout) => Flow::On,
            Err(RecvTimeoutError::Disconnected) => Flow::Closed,
        }
    }

    fn apply(&mut self, message: Message) -> Flow {
        let now = self.shared.now();
        match message {
            Message::Submit { request, outlet, more } => {
                self.more = more;
                self.seen.add(Unseen::of(&request, self.scheduler.config()));
                self.outlets.insert(request.id, outlet);
                self.command(Command::Submit(request), now);
            }
            Message::Tell(command) => self.command(command, now),
            // Whoever asked may have stopped waiting.
            Message::Session(id, answer) => _ = answer.send(self.scheduler.session(id, now)),
            Message::Explain(prompt, salt, session, answer) => {
                _ = answer.send(self.scheduler.explain(&prompt, salt.as_deref(), session));
            }
            Message::Stats(answer) => {
                // What has ended is told before it is counted: who reads the counts may rely on the places being free.
                self.deliver();
                self.publish();
                // Whoever asked may have stopped waiting.
                let _ = answer.send(EngineStats { scheduler: self.scheduler.stats(), time: self.time });
            }
            Message::Record(recording, answer) => {
                let (recorder, header) = *recording;
                let _ = answer.send(self.begin_recording(recorder, &header));
            }
            Message::EndRecording(recording) => drop(self.recorder.take_if(|recorder| recorder.is(&recording))),
            Message::Watch(teller) => {
                self.readers.add(teller);
                self.scheduler.watch(true);
            }
            Message::Close => return Flow::Closed,
        }
        if self.shared.closing.load(Ordering::Acquire) { Flow::Closed } else { Flow::On }
    }

    /// The scheduler is told of nothing but through here, so that a recording has all of it.
    fn command(&mut self, command: Command, now: Time) {
        if let Some(recorder) = &mut self.recorder {
            recorder.command(&command, now);
        }
        self.scheduler.apply(command, now);
    }

    fn begin_recording(&mut self, mut recorder: Recorder, header: &Header) -> Result<(), String> {
        if let Some(recorder) = &self.recorder {
            return Err(format!(
                "a recording into {} is under way; it has to be closed first",
                recorder.path().display()
            ));
        }
        self.deliver();
        if !self.scheduler.start_over() {
            let what = "a recording begins while nothing runs or waits and no session is open; close them, or wait";
            return Err(what.to_owned());
        }
        recorder.begin(header);
        self.recorder = Some(recorder);
        Ok(())
    }

    /// Hands out everything the scheduler has to say. A stop string makes it say more.
    fn deliver(&mut self) {
        self.prefetch_outlets();
        while let Some(event) = self.scheduler.next_event() {
            match event {
                Event::Begun { id } => {
                    if self.outlets.get(&id).is_some_and(|outlet| !outlet.begin()) {
                        let now = self.shared.now();
                        self.command(Command::Cancel(id), now);
                    }
                }
                Event::Token { id, drawn } => {
                    let Some(outlet) = self.outlets.get_mut(&id) else { continue };
                    let stop = outlet.push(drawn);
                    if outlet.mailbox().every_token() {
                        self.touched.add(outlet.mailbox());
                    }
                    if let Some(text) = stop {
                        let now = self.shared.now();
                        self.command(Command::StopString { id, text }, now);
                    }
                }
                Event::PromptLogprobs { id, logprobs } => {
                    if let Some(outlet) = self.outlets.get(&id) {
                        outlet.mailbox().push_prompt_logprobs(outlet.index(), logprobs);
                    }
                }
                Event::Logits { id, logits } => {
                    if let Some(outlet) = self.outlets.get(&id) {
                        outlet.mailbox().push_logits(outlet.index(), logits);
                    }
                }
                Event::Finished { id, finish, record } => {
                    let Some(mut outlet) = self.outlets.remove(&id) else { continue };
                    outlet.finish(finish, *record);
                    self.touched.add(outlet.mailbox());
                }
            }
        }
        self.touched.tell();
        if self.scheduler.is_watched() {
            let now = self.shared.now();
            let read = self.readers.tell(self.scheduler.take_notes(), now);
            self.scheduler.watch(read);
        }
    }

    /// As for the scheduler's sequences: what the step's tokens go through has left the caches since the last.
    fn prefetch_outlets(&self) {
        let passed = self.scheduler.next_tokens().filter_map(|(id, token_id)| Some((self.outlets.get(&id)?, token_id)));
        let passed: Vec<_> = passed.collect();
        for depth in Outlet::DEPTHS {
            passed.iter().for_each(|(outlet, token_id)| outlet.prefetch(*token_id, depth));
        }
    }
}

/// Messages that are read between two steps: a few milliseconds' work.
const MOST_MESSAGES: usize = 1024;

/// How long an idle engine waits for what a caller has said will come at once.
const GATHERING: Duration = Duration::from_millis(5);

/// How long closing waits for the rest of a recording.
const PATIENCE_OF_DISK: Duration = Duration::from_secs(30);

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without words")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::simulated::{CostModel, Simulated};
    use crate::kv::KvLayout;
    use crate::request::RequestId;
    use crate::schedule::SchedulerConfig;

    #[test]
    fn whoever_sends_all_the_time_does_not_keep_others_from_their_steps() {
        let config = SchedulerConfig {
            max_num_seqs: 1,
            max_num_batched_tokens: 1,
            max_queue: 0,
            max_model_len: 10,
            layout: KvLayout::new(4),
            blocks: 3,
            itl_target_ns: None,
        };
        let (sender, inbox) = std::sync::mpsc::channel();
        let mut runner = Runner {
            scheduler: Scheduler::new(config).expect("a possible configuration"),
            executor: Box::new(Simulated::new(CostModel { step_ns: 1.0, row_ns: 1.0, context_ns: 0.0 }, 10)),
            inbox,
            shared: Arc::new(Shared::new()),
            outlets: Outlets::default(),
            touched: Touched::default(),
            seen: Unseen::default(),
            more: false,
            time: StepTime::default(),
            recorder: None,
            readers: Readers::default(),
        };
        (0..3 * MOST_MESSAGES as u64).for_each(|id| {
            sender.send(Message::Tell(Command::Cancel(RequestId(id)))).expect("it is open");
        });
        for _ in 0..3 {
            assert!(runner.inbox.try_recv().is_ok(), "there are more");
            assert!(runner.drain() == Flow::On);
        }
        assert!(runner.inbox.try_recv().is_err(), "nobody waits for ever");
    }
}
