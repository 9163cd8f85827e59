//! Workers that run one parallel region at a time.
//!
//! An operation of a decoder takes microseconds, so a region must begin and end in about one. Workers therefore spin for
//! a moment after each region before they park, and a worker that is too late to a region (asleep, or its core taken by
//! another process) is not waited for.
//!
//! Tasks are numbered, and every thread has a share of neighbours: it reads what lies side by side, and its counter stays in
//! its own cache. Whoever is through with its share takes from those of others, so a share whose owner is late, or slow,
//! is done all the same. A region has up to three stages; no task of one begins before all of the one before are done.
//!
//! The thread that calls [`Pool::run`] is one of the workers.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a worker looks for the next region before it parks, and the caller for the end of one. Longer than the gap
/// between two operations of a step, far shorter than the gap between two steps.
const SPIN: Duration = Duration::from_micros(50);

/// A number of threads, the caller's among them, that run the tasks of one region at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    cores: Vec<usize>,
}

/// A stage: a function on `0..tasks`.
pub(crate) type Stage<'a> = (usize, &'a (dyn Fn(usize) + Sync));

/// Stages of a region. Where there are fewer, the first ones are empty.
const STAGES: usize = 3;

/// The stages of the region that runs. The references are good for as long as the region is open or entered.
#[derive(Clone, Copy)]
struct Region {
    stages: [(usize, *const (dyn Fn(usize) + Sync)); STAGES],
}

/// A thread's share of each stage: the next task of it. In cache lines of its own, two because they are fetched in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Share {
    next: [AtomicUsize; STAGES],
}

/// The thread whose share task `i` of `tasks` is in.
pub(crate) fn sharer(i: usize, tasks: usize, threads: usize) -> usize {
    ((i + 1) * threads - 1) / tasks
}

/// Where the share of `thread` begins.
fn share_begin(thread: usize, tasks: usize, threads: usize) -> usize {
    thread * tasks / threads
}

// The state of a pool in one word, so that a worker enters a region and the caller closes it without a race:
//   [regions so far | OPEN | how many workers are inside]
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const ONE_REGION: u64 = 1 << 32;

struct Shared {
    state: AtomicU64,
    region: UnsafeCell<Region>,
    /// The caller's first, then the workers'.
    shares: Box<[Share]>,
    /// Tasks of each stage that are not done. (Of the last, nobody asks.)
    left: [AtomicUsize; STAGES],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The caller, while it may be parked.
    caller: Mutex<Option<Thread>>,
    parked: Vec<AtomicBool>,
    stop: AtomicBool,
}

// SAFETY: `region` is the only field that is not already shareable. The caller writes it while the region is closed and
// nobody is inside; workers read it only after they entered an open one (see `Shared::enter`). What it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `region` is used only between opening and closing, wherever `Shared` lives.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads`, or of as many as this process may use at once (its affinity mask and its cgroup's quota).
    ///
    /// Each worker is pinned to a core of its own if the threads are as many as the cores: with fewer, two pools (or two
    /// programs) would be pinned to the same ones while others idle. The calling thread stays as it is; see
    /// [`Pool::pin_caller`].
    pub fn new(threads: Option<usize>) -> std::io::Result<Self> {
        let threads = match threads {
            Some(threads) => threads.max(1),
            None => thread::available_parallelism().map_or(1, usize::from),
        };
        let mut cores = affinity::cores();
        if cores.len() != threads {
            cores.clear();
        }
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            region: UnsafeCell::new(Region { stages: [(0, &|_| {}); STAGES] }),
            shares: (0..threads).map(|_| Share::default()).collect(),
            left: Default::default(),
            panic: Mutex::new(None),
            caller: Mutex::new(None),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new(), cores };
        for index in 0..threads - 1 {
            let shared = pool.shared.clone();
            let core = pool.cores.get(index + 1).copied();
            let worker = thread::Builder::new().name(format!("octavo-{}", index + 1)).spawn(move || {
                if let Some(core) = core {
                    affinity::pin(core);
                }
                shared.work(index);
            })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// How many threads run a region, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Pins the calling thread to the one core that no worker is pinned to. For a thread that does nothing else than run
    /// this pool's regions.
    pub fn pin_caller(&self) {
        if let Some(&core) = self.cores.first() {
            affinity::pin(core);
        }
    }

    /// Calls `task` once for every number in `0..tasks`, in any order, on all threads; returns when all are done.
    ///
    /// If a task panics, no further tasks begin, and the panic goes on in the caller.
    pub fn run(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run_stages([(tasks, task)]);
    }

    /// As [`Pool::run`], but all tasks of a stage come after all of the one before.
    pub(crate) fn run_stages<const N: usize>(&mut self, some: [Stage<'_>; N]) {
        const { assert!(N <= STAGES) }
        if self.workers.is_empty() || some.iter().all(|(tasks, _)| *tasks <= 1) {
            return some.iter().for_each(|(tasks, task)| (0..*tasks).for_each(task));
        }
        let mut stages: [Stage<'_>; STAGES] = [(0, &|_| {}); STAGES];
        stages[STAGES - N..].copy_from_slice(&some);
        self.shared.open(Region { stages: stages.map(|(tasks, task)| (tasks, erase_lifetime(task))) });
        for (worker, parked) in self.workers.iter().zip(&self.shared.parked) {
            if parked.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        self.shared.run_tasks(0, stages);
        self.shared.close();
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Splits `data` into pieces of `piece_len` (the last may be shorter) and calls `task` with each and its number.
    pub fn run_pieces<T: Send>(&mut self, data: &mut [T], piece_len: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let pieces = SharedSlice::new(data);
        let len = pieces.len;
        self.run(len.div_ceil(piece_len), &|i| {
            let begin = i * piece_len;
            // SAFETY: `run` calls this once for each `i`, and pieces of different `i` do not overlap.
            let piece = unsafe { pieces.slice(begin, piece_len.min(len - begin)) };
            task(i, piece);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its tasks, so it cannot have died of one.
            let _ = worker.join();
        }
    }
}

/// The same reference, for a region that ends before it does.
fn erase_lifetime<'a>(task: &'a (dyn Fn(usize) + Sync + 'a)) -> *const (dyn Fn(usize) + Sync) {
    let task: *const (dyn Fn(usize) + Sync + 'a) = task;
    // SAFETY: only the lifetime in the type changes. `run` holds the reference until `close` has seen every worker out.
    unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), *const (dyn Fn(usize) + Sync)>(task) }
}

impl Shared {
    /// Lets workers in. By the caller only, with the region closed and nobody inside.
    fn open(&self, region: Region) {
        let threads = self.shares.len();
        for (thread, share) in self.shares.iter().enumerate() {
            for (next, (tasks, _)) in share.next.iter().zip(region.stages) {
                next.store(share_begin(thread, tasks, threads), Ordering::Relaxed);
            }
        }
        for (left, (tasks, _)) in self.left.iter().zip(region.stages) {
            left.store(tasks, Ordering::Relaxed);
        }
        // SAFETY: closed and nobody inside, so nobody reads; workers will see this write because they enter through `state`.
        unsafe { *self.region.get() = region };
        let before = self.state.load(Ordering::Relaxed);
        debug_assert_eq!(before & (OPEN | INSIDE), 0);
        // SeqCst pairs with the worker that announces itself parked and then looks at the state once more.
        self.state.store(before.wrapping_add(ONE_REGION) | OPEN, Ordering::SeqCst);
    }

    /// Lets no more workers in and waits until the last has left.
    fn close(&self) {
        if self.state.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE == 0 {
            return;
        }
        if spin_until(|| self.state.load(Ordering::Acquire) & INSIDE == 0) {
            return;
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        while self.state.load(Ordering::Acquire) & INSIDE != 0 {
            thread::park_timeout(Duration::from_millis(1)); // the last one out unparks; the limit covers a lost race
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A worker's life.
    fn work(&self, index: usize) {
        let mut done = 0;
        loop {
            let is_new = |state: u64| state & OPEN != 0 && state / ONE_REGION != done;
            let ready = || self.stop.load(Ordering::Relaxed) || is_new(self.state.load(Ordering::Acquire));
            if !spin_until(ready) {
                self.parked[index].store(true, Ordering::SeqCst);
                while !self.stop.load(Ordering::SeqCst) && !is_new(self.state.load(Ordering::SeqCst)) {
                    thread::park();
                }
                self.parked[index].store(false, Ordering::SeqCst);
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let state = self.state.load(Ordering::Acquire);
            if !is_new(state) {
                continue; // it closed in the meantime
            }
            if self.enter(index, state) {
                done = state / ONE_REGION;
            }
        }
    }

    /// Enters the region of `state`, works in it, leaves. False if the state has changed meanwhile.
    fn enter(&self, index: usize, state: u64) -> bool {
        if self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        // SAFETY: we are counted inside of an open region, so `run` is still waiting: the cell is not written, and the
        // task it points to lives.
        let Region { stages } = unsafe { *self.region.get() };
        // SAFETY: as above.
        self.run_tasks(index + 1, stages.map(|(tasks, task)| (tasks, unsafe { &*task })));
        let before = self.state.fetch_sub(1, Ordering::AcqRel);
        if before & INSIDE == 1
            && before & OPEN == 0
            && let Some(caller) = &*self.caller.lock().unwrap_or_else(PoisonError::into_inner)
        {
            caller.unpark();
        }
        true
    }

    /// Runs tasks until none is left. Never unwinds: the first panic is kept for the caller.
    fn run_tasks(&self, thread: usize, stages: [Stage<'_>; STAGES]) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            for (number, stage) in stages.into_iter().enumerate().filter(|(_, (tasks, _))| *tasks > 0) {
                let (done, left) = (self.run_stage(thread, number, stage), &self.left[number]);
                if number + 1 == STAGES {
                    break;
                }
                if done > 0 {
                    // Release: what these tasks wrote is seen by whoever sees all done.
                    left.fetch_sub(done, Ordering::Release);
                }
                let all_done = || left.load(Ordering::Acquire) == 0 || self.gave_up();
                while !spin_until(all_done) {
                    thread::yield_now();
                }
            }
        }));
        if let Err(panic) = result {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            self.give_up();
        }
    }

    /// Runs tasks of one stage, first those of the thread's own share. Returns how many.
    fn run_stage(&self, thread: usize, stage: usize, (tasks, task): Stage<'_>) -> usize {
        let (threads, mut done) = (self.shares.len(), 0);
        for owner in (thread..threads).chain(0..thread) {
            let (next, end) = (&self.shares[owner].next[stage], share_begin(owner + 1, tasks, threads));
            // Only asked, where nothing is left: its line stays in the cache of whoever works on it.
            while next.load(Ordering::Relaxed) < end {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                task(i);
                done += 1;
            }
        }
        done
    }

    /// Lets no more tasks begin.
    fn give_up(&self) {
        for next in self.shares.iter().flat_map(|share| &share.next) {
            next.store(GAVE_UP, Ordering::Relaxed);
        }
    }

    fn gave_up(&self) -> bool {
        self.shares[0].next[STAGES - 1].load(Ordering::Relaxed) >= GAVE_UP
    }
}

/// More than any number of a task.
const GAVE_UP: usize = usize::MAX / 2;

/// Looks at `ready` for [`SPIN`]; whether it became true.
fn spin_until(ready: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() > SPIN {
            return ready();
        }
    }
}

/// A slice whose disjoint parts several tasks write at once.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out parts of the one mutable borrow it was made of; that they are disjoint is owed by `slice`'s callers.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Borrows `data` for as long as its parts are in use.
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), borrow: std::marker::PhantomData }
    }

    /// The part of `len` from `begin`. Panics if it does not lie inside.
    ///
    /// # Safety
    /// No two parts that are in use at once overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, begin: usize, len: usize) -> &'a mut [T] {
        assert!(begin <= self.len && len <= self.len - begin);
        // SAFETY: inside of the borrow by the line above; not aliased by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(begin), len) }
    }

    /// The part of `len` from `begin`, to be read. Panics if it does not lie inside.
    ///
    /// # Safety
    /// Nobody writes it while it is in use.
    pub(crate) unsafe fn part(&self, begin: usize, len: usize) -> &'a [T] {
        assert!(begin <= self.len && len <= self.len - begin);
        // SAFETY: inside of the borrow by the line above; not written by this function's contract.
        unsafe { std::slice::from_raw_parts(self.start.add(begin), len) }
    }
}

/// Cores and threads, as far as the system lets us say.
mod affinity {
    use std::sync::OnceLock;

    /// The cores that this process had when first asked; empty where the system cannot tell.
    pub fn cores() -> Vec<usize> {
        // Remembered, because a thread that was pinned (and any it spawns) would see one core.
        static CORES: OnceLock<Vec<usize>> = OnceLock::new();
        CORES.get_or_init(read_cores).clone()
    }

    #[cfg(target_os = "linux")]
    fn read_cores() -> Vec<usize> {
        // SAFETY: a set of bits is valid when zeroed, and the call writes at most the size it is told.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
                return Vec::new();
            }
            (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect()
        }
    }

    /// Keeps the calling thread on `core`. A refusal changes nothing but speed, so it is not an error.
    #[cfg(target_os = "linux")]
    pub fn pin(core: usize) {
        // SAFETY: as in `read_cores`; `core` came from there, so it is below CPU_SETSIZE.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn read_cores() -> Vec<usize> {
        Vec::new()
    }

    #[cfg(not(target_os = "linux"))]
    pub fn pin(_core: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once_and_before_run_returns() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(Some(threads)).unwrap();
            assert_eq!(pool.threads(), threads);
            for region in 0..2000 {
                let tasks = [0, 1, 2, 3, 7, 64][region % 6];
                let runs: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|i| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} threads, region {region}");
                if region % 500 == 0 {
                    thread::sleep(Duration::from_millis(1)); // long enough for the workers to park
                }
            }
        }
    }

    #[test]
    fn shares_are_neighbours_and_cover_all() {
        for (tasks, threads) in [(1, 2), (2, 3), (7, 3), (8, 8), (100, 7)] {
            assert_eq!((share_begin(0, tasks, threads), share_begin(threads, tasks, threads)), (0, tasks));
            for i in 0..tasks {
                let thread = sharer(i, tasks, threads);
                let share = share_begin(thread, tasks, threads)..share_begin(thread + 1, tasks, threads);
                assert!(share.contains(&i), "{i} of {tasks}, {threads} threads: {thread} has {share:?}");
            }
        }
    }

    #[test]
    fn all_of_a_stage_is_done_and_seen_before_the_next_begins() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Pool::new(Some(threads)).unwrap();
            for region in 0..2000 {
                let counts = [[0, 1, 2, 5, 40][region % 5], [0, 1, 3, 64][region % 4], [0, 1, 9][region % 3]];
                let [mut first, mut second] = [vec![0; counts[0]], vec![0; counts[1]]];
                let (first, second, seen) =
                    (SharedSlice::new(&mut first), SharedSlice::new(&mut second), AtomicUsize::new(0));
                let sum_of_first = counts[0] * (counts[0] + 1) / 2;
                pool.run_stages([
                    // SAFETY: every task has a number of its own.
                    (counts[0], &|i| unsafe { first.slice(i, 1) }[0] = i + 1),
                    (counts[1], &|i| {
                        // SAFETY: nobody writes any more.
                        let sum = unsafe { first.part(0, counts[0]) }.iter().sum::<usize>();
                        // SAFETY: every task has a number of its own.
                        let own = unsafe { second.slice(i, 1) };
                        own[0] = sum;
                    }),
                    (counts[2], &|_| {
                        // SAFETY: nobody writes any more.
                        assert!(unsafe { second.part(0, counts[1]) }.iter().all(|sum| *sum == sum_of_first));
                        seen.fetch_add(1, Ordering::Relaxed);
                    }),
                ]);
                assert_eq!(seen.into_inner(), counts[2], "{threads} threads, region {region}");
            }
        }
    }

    #[test]
    fn a_panic_in_one_stage_stops_the_next() {
        let mut pool = Pool::new(Some(3)).unwrap();
        for victim in 0..16 {
            let begun = AtomicUsize::new(0);
            let next = |_| {
                begun.fetch_add(1, Ordering::Relaxed);
            };
            let panics = |i| assert_ne!(i, victim, "gave up");
            let done = |_| ();
            catch_unwind(AssertUnwindSafe(|| pool.run_stages([(16, &panics), (16, &next)]))).unwrap_err();
            catch_unwind(AssertUnwindSafe(|| pool.run_stages([(16, &done), (16, &panics), (16, &next)]))).unwrap_err();
            assert_eq!(begun.into_inner(), 0);
        }
    }

    #[test]
    fn a_slow_worker_is_waited_for() {
        let mut pool = Pool::new(Some(2)).unwrap();
        for _ in 0..20 {
            let finished = AtomicUsize::new(0);
            pool.run(2, &|i| {
                thread::sleep(Duration::from_micros(300 * i as u64));
                finished.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(finished.into_inner(), 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(Some(3)).unwrap();
        for victim in 0..16 {
            let result =
                catch_unwind(AssertUnwindSafe(|| pool.run(16, &|i| assert_ne!(i, victim, "task {i} gave up"))));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("gave up"), "{message}");
            let sum = AtomicUsize::new(0);
            pool.run(100, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn pieces_cover_the_slice_and_their_writes_are_seen() {
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(Some(threads)).unwrap();
            for len in [0, 1, 9, 10, 11, 95] {
                let mut data = vec![0; len];
                pool.run_pieces(&mut data, 10, &|i, piece| {
                    for (j, x) in piece.iter_mut().enumerate() {
                        *x = i * 10 + j;
                    }
                });
                assert_eq!(data, (0..len).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn dropping_joins_even_when_workers_are_parked() {
        for wait_ms in [0, 2] {
            let pool = Pool::new(Some(4)).unwrap();
            thread::sleep(Duration::from_millis(wait_ms));
            let shared = Arc::downgrade(&pool.shared);
            drop(pool);
            assert!(shared.upgrade().is_none(), "a worker outlived its pool");
        }
    }
}
