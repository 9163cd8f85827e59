//! How many instructions a piece of work takes, exactly. A forked child does the work while its parent lets it run one
//! instruction at a time, so no counter of the CPU is needed, and two runs differ by what hash maps' random keys make of
//! them and by nothing else. (A `rep` prefix counts once for every repetition.) On Linux, for x86-64 and AArch64.

/// Told to by the work: from here on it counts, or no longer. A mark costs instructions of its own, always as many.
#[derive(Clone, Copy)]
pub struct Mark(imp::Mark);

impl Mark {
    /// Begins to count, or ends.
    pub fn toggle(self) {
        self.0.toggle();
    }
}

/// Instructions that `work` takes between its marks. It is done in a child, so nothing of it is left, and must not wait for
/// other threads, which the child does not have. `None`: not on this machine, or it may not be done here.
pub fn count(work: impl FnOnce(Mark)) -> Option<u64> {
    let (of_a_pair, _) = imp::count(|mark| {
        mark.toggle();
        mark.toggle();
    })?;
    let (counted, pairs) = imp::count(|mark| work(Mark(mark)))?;
    Some(counted.saturating_sub(pairs * of_a_pair))
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod imp {
    use std::mem::zeroed;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::ptr::null_mut;

    /// How the child ends: its work is done, or it may not be traced, or it has panicked.
    const DONE: i32 = 0;
    const UNTRACED: i32 = 1;
    const PANICKED: i32 = 2;
    /// More than any work here takes: where instructions are retried when they are interrupted, stepping never ends.
    const MOST: u64 = 200_000_000;

    #[derive(Clone, Copy)]
    pub struct Mark(libc::pid_t);

    impl Mark {
        pub fn toggle(self) {
            // SAFETY: a signal to the calling process, which its tracer takes away.
            unsafe { libc::kill(self.0, libc::SIGSTOP) };
        }
    }

    /// This thread, and children that it has meanwhile, on one CPU: to hand over to another for every instruction takes three
    /// times as long.
    struct Pinned(libc::cpu_set_t);

    impl Pinned {
        fn here() -> Self {
            // SAFETY: sets of CPUs are plain bits, of the size that is told; a CPU that runs us is in range.
            unsafe {
                let (mut before, mut here): (libc::cpu_set_t, libc::cpu_set_t) = (zeroed(), zeroed());
                libc::sched_getaffinity(0, size_of_val(&before), &mut before);
                libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut here);
                libc::sched_setaffinity(0, size_of_val(&here), &here);
                Self(before)
            }
        }
    }

    impl Drop for Pinned {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &self.0) };
        }
    }

    /// Instructions between marks, and how many pairs of marks there were.
    pub fn count(work: impl FnOnce(Mark)) -> Option<(u64, u64)> {
        let _pinned = Pinned::here();
        // SAFETY: the child goes on with this thread alone, never returns from here, and takes no lock that another thread
        // can have held; the allocator's are reset by `fork`.
        match unsafe { libc::fork() } {
            ..0 => None,
            0 => child(work),
            child => trace(child),
        }
    }

    fn child(work: impl FnOnce(Mark)) -> ! {
        // SAFETY: without pointers.
        let traced = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, null_mut::<u8>(), null_mut::<u8>()) } == 0;
        let done = || catch_unwind(AssertUnwindSafe(|| work(Mark(std::process::id() as libc::pid_t)))).is_ok();
        let status = if !traced {
            UNTRACED
        } else if done() {
            DONE
        } else {
            PANICKED
        };
        // SAFETY: ends the child, without what the parent does at its end.
        unsafe { libc::_exit(status) }
    }

    fn trace(child: libc::pid_t) -> Option<(u64, u64)> {
        let (mut counted, mut marks) = (0, 0);
        loop {
            let mut status = 0;
            // SAFETY: a child of this thread, and a place for its status.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(waited, child, "the child is waited for");
            if libc::WIFEXITED(status) {
                assert_ne!(libc::WEXITSTATUS(status), PANICKED, "the work has panicked");
                return (libc::WEXITSTATUS(status) == DONE).then_some((counted, marks / 2));
            }
            let signal = if libc::WIFSTOPPED(status) { libc::WSTOPSIG(status) } else { 0 };
            marks += u64::from(signal == libc::SIGSTOP);
            let counts = marks % 2 == 1;
            counted += u64::from(counts);
            let known = [libc::SIGSTOP, libc::SIGTRAP].contains(&signal) && counted < MOST;
            let request = match counts {
                _ if !known => libc::PTRACE_KILL,
                true => libc::PTRACE_SINGLESTEP,
                false => libc::PTRACE_CONT,
            };
            // SAFETY: a stopped child of this thread; no address, and no signal for it.
            unsafe { libc::ptrace(request, child, null_mut::<u8>(), null_mut::<u8>()) };
            if !known {
                return None;
            }
        }
    }
}

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod imp {
    #[derive(Clone, Copy)]
    pub struct Mark;

    impl Mark {
        pub fn toggle(self) {}
    }

    pub fn count(_: impl FnOnce(Mark)) -> Option<(u64, u64)> {
        None
    }
}
