//! The loop: commands in, one batch, events out.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};

use super::handle::{CLOSED, Message, Shared};
use super::mailbox::Wake;
use super::outlet::Outlet;
use crate::execute::Executor;
use crate::request::RequestId;
use crate::schedule::{Command, Event, Scheduler};

/// Everything the engine thread owns.
pub(super) struct Runner {
    pub scheduler: Scheduler,
    pub executor: Box<dyn Executor>,
    pub inbox: Receiver<Message>,
    pub shared: Arc<Shared>,
    pub outlets: HashMap<RequestId, Outlet>,
    /// Wakers touched by this step, each to be woken once.
    pub touched: Vec<Arc<dyn Wake>>,
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
        self.wake_all();
    }

    fn until_closed(&mut self) -> Result<(), String> {
        loop {
            if self.drain() == Flow::Closed {
                return Ok(());
            }
            if !self.step()? && self.wait() == Flow::Closed {
                return Ok(());
            }
        }
    }

    /// One step. `false`: there was nothing to compute.
    fn step(&mut self) -> Result<bool, String> {
        let batch = self.scheduler.schedule(self.shared.now());
        let computed = match batch {
            None => false,
            Some(batch) => {
                // Who has ended before this step hears of it before this step.
                self.deliver();
                self.executor.launch(&batch)?;
                let output = self.executor.collect()?;
                self.scheduler.commit(batch, output, self.shared.now());
                true
            }
        };
        self.deliver();
        Ok(computed)
    }

    /// Applies every command that has arrived.
    fn drain(&mut self) -> Flow {
        loop {
            let flow = match self.inbox.try_recv() {
                Ok(message) => self.apply(message),
                Err(TryRecvError::Empty) => return Flow::On,
                Err(TryRecvError::Disconnected) => Flow::Closed,
            };
            if flow == Flow::Closed {
                return flow;
            }
        }
    }

    /// Sleeps until a command arrives. (Nothing else can bring work: a living request always has something to run.)
    fn wait(&mut self) -> Flow {
        self.inbox.recv().map_or(Flow::Closed, |message| self.apply(message))
    }

    fn apply(&mut self, message: Message) -> Flow {
        let now = self.shared.now();
        match message {
            Message::Submit(request, outlet) => {
                self.outlets.insert(request.id, *outlet);
                self.scheduler.apply(Command::Submit(request), now);
            }
            Message::Cancel(id) => self.scheduler.apply(Command::Cancel(id), now),
            Message::Stats(answer) => {
                // What has ended is told before it is counted: who reads the counts may rely on the places being free.
                self.deliver();
                // Whoever asked may have stopped waiting.
                let _ = answer.send(self.scheduler.stats());
            }
            Message::Close => return Flow::Closed,
        }
        if self.shared.closing.load(Ordering::Acquire) { Flow::Closed } else { Flow::On }
    }

    /// Hands out everything the scheduler has to say. A stop string makes it say more.
    fn deliver(&mut self) {
        while let Some(event) = self.scheduler.next_event() {
            match event {
                Event::Token { id, drawn } => {
                    let Some(outlet) = self.outlets.get_mut(&id) else { continue };
                    let stop = outlet.push(drawn);
                    outlet.wake(&mut self.touched);
                    if let Some(text) = stop {
                        self.scheduler.apply(Command::StopString { id, text }, self.shared.now());
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
                    outlet.wake_at_end(&mut self.touched);
                }
            }
        }
        self.wake_all();
    }

    fn wake_all(&mut self) {
        for waker in self.touched.drain(..) {
            waker.wake();
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without words")
}
