//! What callers are told, held against what becomes of them, in hours like those of an engine: lists beside strangers, callers
//! who come at random, and more of them than there is room for.

use std::collections::BTreeMap;

use octavo::execute::simulated::{CostModel, Simulated};
use octavo::kv::KvLayout;
use octavo::request::{Request, RequestId, Time};
use octavo::schedule::{Load, SchedulerConfig, Unseen};

use crate::world::{Coins, Gate, VOCAB, World, prompt, request};

/// Requests that are alike but for their length.
#[derive(Clone, Copy)]
struct Kind {
    user: &'static str,
    /// Every caller is another user.
    each_its_own: bool,
    prompt: (usize, usize),
    /// So many tokens at the beginning of a prompt are one of three that others begin with, too.
    shared: usize,
    answer: (usize, usize),
    /// Answers end of their own accord, after fifty tokens in the mean, or at their limit.
    early: bool,
}

const STRANGER: Kind =
    Kind { user: "stranger", each_its_own: true, prompt: (20, 200), shared: 0, answer: (20, 100), early: false };

enum Comes {
    /// One call of many prompts, at once: twice as many are in flight as may run.
    List { count: usize, kind: Kind },
    /// So many callers, each of whom asks again as soon as it is answered.
    Loop { callers: usize, until_s: f64, kind: Kind },
    /// At random, so often a second.
    Crowd { each_second: f64, until_s: f64, kind: Kind },
}

impl Comes {
    fn kind(&self) -> Kind {
        let (Self::List { kind, .. } | Self::Loop { kind, .. } | Self::Crowd { kind, .. }) = self;
        *kind
    }
}

struct Case {
    name: String,
    places: usize,
    queue: usize,
    comes: Vec<Comes>,
}

/// What a request was told when it came.
struct Told {
    of: usize,
    at: u64,
    ttft_ns: u64,
    id: RequestId,
}

/// What a refused one was told, how many had ended then and how many had to, and what it found when it came back.
struct Refused {
    at: u64,
    retry_ns: u64,
    ended: usize,
    ends: usize,
    found: Option<bool>,
}

/// A request on its way.
struct Arrival {
    of: usize,
    caller: u64,
    request: Request,
    /// Which refusal it comes back after.
    refused: Option<usize>,
}

struct Hour<'a> {
    case: &'a Case,
    config: SchedulerConfig,
    world: World,
    gate: Gate,
    coins: Coins,
    /// By the time they come.
    coming: BTreeMap<(u64, u64), Arrival>,
    requests: u64,
    /// Prompts of each list that are still to come.
    left: Vec<usize>,
    /// Those who are let in: of which kind, and which caller's.
    inside: BTreeMap<RequestId, (usize, u64)>,
    load: Load,
    unseen: Unseen,
    /// Who came while a step was under way.
    unheard: Vec<Request>,
    told: Vec<Told>,
    refused: Vec<Refused>,
    /// When each request ended.
    ends: Vec<u64>,
}

fn even(coins: &mut Coins) -> f64 {
    (coins.next() >> 11) as f64 / (1u64 << 53) as f64
}

impl<'a> Hour<'a> {
    /// Until all have ended.
    fn play(case: &'a Case, cost: CostModel, target_ms: Option<f64>, seed: u64) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: case.places,
            max_num_batched_tokens: 512,
            max_queue: case.queue,
            max_model_len: 4096,
            layout: KvLayout::new(16),
            blocks: 100_000,
            itl_target_ns: target_ms.map(|ms| (ms * 1e6) as u64),
        };
        let mut world = World::unchecked(config.clone());
        world.executor = Simulated::new(cost, VOCAB);
        let mut weather = Coins(seed ^ 77);
        world.weather = Box::new(move |_, ns| {
            let normal = (0..12).map(|_| even(&mut weather)).sum::<f64>() - 6.0;
            (ns as f64 * (0.05 * normal).exp()) as u64
        });
        let mut hour = Self {
            case,
            load: world.scheduler.load(),
            config,
            world,
            gate: Gate::default(),
            coins: Coins(seed),
            coming: BTreeMap::new(),
            requests: 0,
            left: vec![0; case.comes.len()],
            inside: BTreeMap::new(),
            unseen: Unseen::default(),
            unheard: Vec::new(),
            told: Vec::new(),
            refused: Vec::new(),
            ends: Vec::new(),
        };
        (0..case.comes.len()).for_each(|of| hour.plan(of));
        while hour.step() {}
        hour
    }

    fn plan(&mut self, of: usize) {
        match self.case.comes[of] {
            Comes::List { count, .. } => {
                let first = count.min(2 * self.config.max_num_seqs);
                self.left[of] = count - first;
                (0..first).for_each(|_| self.come(0, of, 0));
            }
            Comes::Loop { callers, .. } => {
                (0..callers as u64).for_each(|caller| self.come(caller * 1_000_000, of, caller))
            }
            Comes::Crowd { each_second, until_s, .. } => {
                let mut at = 0.1;
                while at < until_s {
                    self.come((at * 1e9) as u64, of, self.requests);
                    at -= even(&mut self.coins).max(1e-9).ln() / each_second;
                }
            }
        }
    }

    fn come(&mut self, at: u64, of: usize, caller: u64) {
        let id = self.requests;
        self.requests += 1;
        let kind = self.case.comes[of].kind();
        let mut tokens = prompt(id % 3, kind.shared);
        let own = self.coins.within(kind.prompt.0, kind.prompt.1) - kind.shared;
        tokens.extend(prompt(1000 + id, own));
        let user = if kind.each_its_own { format!("{} {caller}", kind.user).into() } else { kind.user.into() };
        let request = Request {
            user,
            call: RequestId(if self.is_list(of) { u64::MAX - of as u64 } else { id }),
            seed: id.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            end_token_ids: if kind.early { [7].into() } else { [].into() },
            ..request(id, &tokens, self.coins.within(kind.answer.0, kind.answer.1))
        };
        self.coming.insert((at, id), Arrival { of, caller, request, refused: None });
    }

    fn is_list(&self, of: usize) -> bool {
        matches!(self.case.comes[of], Comes::List { .. })
    }

    /// As an engine does it: it plans a step and says what there is to do; some come while it runs; then it hears of them.
    fn step(&mut self) -> bool {
        let ran = self.world.launch().is_some();
        self.load = self.world.scheduler.load();
        self.unseen = Unseen::default();
        if !ran {
            let Some((&(at, _), _)) = self.coming.first_key_value() else { return false };
            self.world.now.0 = self.world.now.0.max(at);
        }
        self.arrive();
        if ran {
            self.world.commit();
        }
        for request in std::mem::take(&mut self.unheard) {
            self.world.submit(request);
        }
        self.gate.let_out(&self.world);
        self.ends.resize(self.world.scheduler.stats().finished as usize, self.world.now.0);
        self.go_on();
        self.world.now.0 += 10_000;
        true
    }

    /// Whoever has come until now.
    fn arrive(&mut self) {
        while let Some(entry) = self.coming.first_entry().filter(|entry| entry.key().0 <= self.world.now.0) {
            let ((at, id), arrival) = entry.remove_entry();
            let request = &arrival.request;
            let entered = self.gate.enter(&self.config, request, Time(at));
            if let Some(refusal) = arrival.refused {
                self.refused[refusal].found = Some(entered.is_ok());
            }
            match entered {
                Ok(ahead) => {
                    let load = self.load.clone().seen_by(self.is_list(arrival.of).then_some(request.call));
                    let forecast = load.forecast(request.prompt.len(), &ahead, &self.unseen, Time(at));
                    self.unseen.add(Unseen::of(request, &self.config));
                    self.told.push(Told { of: arrival.of, at, ttft_ns: forecast.ttft_ns, id: request.id });
                    self.inside.insert(request.id, (arrival.of, arrival.caller));
                    self.unheard.push(arrival.request);
                }
                Err(full) => {
                    let retry_ns = self.load.place_ns(full.ends, &self.unseen, Time(at));
                    self.gate.door.claim(&Gate::call(request), Time(at), retry_ns);
                    let refused = Some(self.refused.len());
                    let ended = self.ends.len();
                    self.refused.push(Refused { at, retry_ns, ended, ends: full.ends, found: None });
                    self.coming.insert((at + retry_ns, id), Arrival { refused, ..arrival });
                }
            }
        }
    }

    /// Who was answered asks again.
    fn go_on(&mut self) {
        let outcomes = &self.world.outcomes;
        let answered: Vec<_> = self.inside.keys().copied().filter(|id| outcomes[id].end.is_some()).collect();
        for (of, caller) in answered.iter().filter_map(|id| self.inside.remove(id)).collect::<Vec<_>>() {
            let now = self.world.now.0;
            match self.case.comes[of] {
                Comes::List { .. } if self.left[of] > 0 => {
                    self.left[of] -= 1;
                    self.come(now + 20_000, of, caller);
                }
                Comes::Loop { until_s, .. } if now < (until_s * 1e9) as u64 => {
                    let pause = self.coins.within(20_000, 2_000_000) as u64;
                    self.come(now + pause, of, caller);
                }
                _ => {}
            }
        }
    }

    /// Real by told, of those who came when a little was known.
    fn first_tokens(&self, of: usize) -> impl Iterator<Item = f64> {
        self.told.iter().filter(move |told| told.of == of && told.at >= 300_000_000).filter_map(|told| {
            let record = self.world.outcome(told.id).record();
            Some((record.submitted.0 + record.ttft_ns()? - told.at) as f64 / told.ttft_ns.max(1) as f64)
        })
    }

    /// Of those who were refused when answers had ended: whether they found a place, and when as many had ended as had to,
    /// by when they were told to come back.
    fn returns(&self) -> (Vec<bool>, Vec<f64>) {
        let refused = || self.refused.iter().filter(|refused| refused.at >= 3_000_000_000);
        let real = |refused: &Refused| {
            let end = self.ends.get(refused.ended + refused.ends - 1)?;
            Some((end - refused.at) as f64 / refused.retry_ns as f64)
        };
        (refused().filter_map(|refused| refused.found).collect(), refused().filter_map(real).collect())
    }
}

/// Of real by told: what a tenth, a half and nine tenths are below.
fn tenths(mut ratios: Vec<f64>) -> [f64; 3] {
    ratios.sort_by(f64::total_cmp);
    [10, 50, 90].map(|percent| ratios.get(ratios.len() * percent / 100).copied().unwrap_or(f64::NAN))
}

/// A small model on a CPU, where others' prompts hardly fit beside those who decode, and a machine that reads fast.
const COSTS: [(&str, CostModel); 2] = [
    ("cpu", CostModel { step_ns: 6e6, row_ns: 0.35e6, context_ns: 30.0 }),
    ("fast", CostModel { step_ns: 4e6, row_ns: 0.03e6, context_ns: 5.0 }),
];

/// Some hours of every case, on every machine and with every target.
fn hours(cases: &[Case], seeds: u64, mut look: impl FnMut(&str, &Case, &[Hour])) {
    for (machine, cost) in COSTS {
        for target_ms in [Some(20.0), Some(30.0), None] {
            for case in cases {
                let play = |seed| Hour::play(case, cost, target_ms, seed);
                let hours: Vec<Hour> = (0..seeds).map(play).collect();
                let target = target_ms.map_or("no target".into(), |ms| format!("{ms} ms"));
                look(&format!("{machine}, {target}, {}", case.name), case, &hours);
            }
        }
    }
}

fn case(name: impl Into<String>, places: usize, queue: usize, comes: Vec<Comes>) -> Case {
    Case { name: name.into(), places, queue, comes }
}

fn crowd(each_second: f64, until_s: f64, kind: Kind) -> Comes {
    Comes::Crowd { each_second, until_s, kind }
}

#[test]
fn a_first_token_comes_about_when_it_was_told_to_whatever_else_there_is() {
    let mut cases = Vec::new();
    for count in [50, 200, 1000] {
        for (name, prompt, answer, early) in [
            ("short prompts and equal answers", (20, 60), (64, 64), false),
            ("short prompts and answers that end early", (20, 60), (64, 256), true),
            ("long prompts", (200, 600), (32, 128), false),
        ] {
            let list = Kind { user: "list", each_its_own: false, prompt, shared: 0, answer, early };
            let strangers = crowd(2.0, 1.0 + count as f64 / 60.0, STRANGER);
            cases.push(case(format!("{count} {name}"), 64, 1024, vec![Comes::List { count, kind: list }, strangers]));
        }
    }
    for each_second in [6.0, 12.0, 24.0] {
        for (each_its_own, early) in [(true, false), (false, false), (true, true)] {
            let kind = Kind { each_its_own, early, ..STRANGER };
            let name = format!("{each_second} a second, each its own: {each_its_own}, early: {early}");
            cases.push(case(name, 16, 10_000, vec![crowd(each_second, 20.0, kind)]));
        }
    }
    let hits = Kind { prompt: (320, 400), shared: 300, ..STRANGER };
    cases.push(case("prompts that are in the cache", 16, 10_000, vec![crowd(12.0, 20.0, hits)]));
    let users = ["a", "b", "c", "d"].map(|user| crowd(5.0, 20.0, Kind { user, each_its_own: false, ..STRANGER }));
    cases.push(case("four users", 16, 10_000, users.into()));
    hours(&cases, 2, |name, case, hours| {
        for (kind, comes) in case.comes.iter().enumerate() {
            let ratios: Vec<f64> = hours.iter().flat_map(|hour| hour.first_tokens(kind)).collect();
            let count = ratios.len();
            let [p10, p50, p90] = tenths(ratios);
            println!("{name}, {}: {count} times {p10:.2} {p50:.2} {p90:.2}", comes.kind().user);
            // Of a few, some come in the first steps, when nothing is known.
            assert!(count < 30 || (0.65..1.45).contains(&p50), "{name}: {p10:.2} {p50:.2} {p90:.2}");
        }
    });
}

#[test]
fn whoever_comes_back_when_told_to_mostly_finds_a_place() {
    let mut cases = Vec::new();
    for (places, queue, callers, early) in
        [(8, 4, 20, false), (8, 4, 20, true), (8, 4, 14, false), (16, 8, 40, false), (64, 16, 200, false)]
    {
        // Callers who share a name are told the same place.
        let answer = (20, if early { 400 } else { 100 });
        let kind = Kind { each_its_own: true, early, prompt: (10, 60), answer, ..STRANGER };
        let name = format!("{callers} callers for {places} and {queue}, early: {early}");
        cases.push(case(name, places, queue, vec![Comes::Loop { callers, until_s: 20.0, kind }]));
    }
    hours(&cases, 1, |name, case, hours| {
        let (found, ratios) =
            hours.iter().map(Hour::returns).fold((Vec::new(), Vec::new()), |mut all, (found, ratios)| {
                all.0.extend(found);
                all.1.extend(ratios);
                all
            });
        let share = found.iter().filter(|found| **found).count() as f64 / found.len() as f64;
        let count = found.len();
        let [p10, p50, p90] = tenths(ratios);
        println!("{name}: {:.0} % of {count} found a place; {p10:.2} {p50:.2} {p90:.2}", 100.0 * share);
        // Answers that end early end when nobody expects it.
        let least = if name.ends_with("early: true") {
            0.5
        } else if case.queue > 8 {
            0.6
        } else {
            0.8
        };
        assert!(count > 50 && share > least, "{name}: {share:.2} of {count} found a place");
        assert!((0.6..1.1).contains(&p50), "{name}: {p10:.2} {p50:.2} {p90:.2}");
    });
}
