use super::*;
use anemoe_io::Random;

const REPEATED: DraftSource = DraftSource::Repetition(20);

/// A text and a machine, by the number of tokens that were made so far. Times are in passes for one token.
struct Simulation<'a> {
    tokens: usize,
    /// Acceptance of a drafted token.
    acceptance: &'a dyn Fn(usize) -> f64,
    /// Time of a pass over so many tokens.
    cost: &'a dyn Fn(usize) -> f64,
    /// Factor of all passes, or of those over drafts only.
    slow: &'a dyn Fn(usize, usize) -> f64,
    /// Largest factor of a random disturbance of each pass is `1 + noise`, the smallest its inverse.
    noise: f64,
    /// True if the lengths were timed before the first token.
    is_timed: bool,
}

const CHEAP: &dyn Fn(usize) -> f64 = &|t| 1.0 + 0.1 * (t - 1) as f64;
/// Large models with shared experts.
const SHARED: &dyn Fn(usize) -> f64 = &|t| 1.0 + 0.45 * ((t - 1) as f64).powf(0.8);
const LENGTHS: [usize; 4] = [1, 2, 4, 8];

fn alone(drafted: usize, seconds: f64) -> PassTime {
    PassTime { seconds, streams: 1, drafted }
}

impl Default for Simulation<'_> {
    fn default() -> Self {
        Simulation {
            tokens: 400,
            acceptance: &|_| 0.0,
            cost: SHARED,
            slow: &|_, _| 1.0,
            noise: 0.1,
            is_timed: true,
        }
    }
}

impl Simulation<'_> {
    /// Returns the time of plain decoding over that with drafts, both without disturbances.
    fn run(&self, seed: u64) -> f64 {
        let mut random = Random::new(seed);
        let mut measure = |at: usize, t: usize| {
            (self.cost)(t) * (self.slow)(at, t) * (1.0 + self.noise).powf(2.0 * random.uniform() - 1.0)
        };
        let mut statistics = DraftStatistics::new(8);
        for k in LENGTHS.into_iter().filter(|_| self.is_timed).flat_map(|k| [0, k, 0, k, 0, k]) {
            statistics.note_time(alone(k, measure(0, k + 1)));
        }
        let mut c = Controller::new(statistics, LENGTHS.to_vec());
        let mut random = Random::new(seed + 1000);
        let (mut made, mut time) = (0, 0.0);
        while made < self.tokens {
            let left = self.tokens - made;
            let k = c.choose(REPEATED, 8.min(left - 1), &DraftRoom::alone(0, left));
            let a = (self.acceptance)(made);
            let accepted = (0..k).take_while(|_| random.uniform() < a).count();
            if k == 0 {
                c.note_followed(20, random.uniform() < a);
            }
            c.note(REPEATED, (k, accepted), alone(k, measure(made, k + 1)), 0.0);
            time += (self.cost)(k + 1);
            made += accepted + 1;
        }
        self.tokens as f64 / time
    }

    /// Returns the mean of 20 runs.
    fn speedup(&self) -> f64 {
        (1..=20).map(|seed| self.run(seed)).sum::<f64>() / 20.0
    }
}

#[test]
fn break_even_is_where_a_pass_costs_what_it_gives() {
    // 1 + a = 1.5, and 1 + a + a^2 + a^3 = 4 at a = 1.
    assert!((break_even(1.5, 1).unwrap() - 0.5).abs() < 1e-9);
    assert!((break_even(4.0, 3).unwrap() - 1.0).abs() < 1e-9);
    assert!(
        break_even(4.4, 3).is_none(),
        "a verification that costs 4.4 tokens never pays for 3 drafted ones"
    );
    assert!(break_even(1.0, 3).unwrap() < 1e-9);
}

/// Checks a formula of the field notes (108 ms for one token, 483 ms for four) against the acceptance that three drafts need.
#[test]
fn the_notes_formula_is_not_the_break_even() {
    let (one, four) = (108.1f64, 483.0f64);
    let wrong = 1.0 - one / (four / 4.0);
    assert!((wrong - 0.10).abs() < 0.01, "{wrong}");
    assert_eq!(break_even(four / one, 3), None);
    assert!(expected(wrong, 3) / four < 1.0 / one, "three tokens drafted at that acceptance lose");
    assert!(expected(1.0, 3) / four < 1.0 / one, "and at any other");
}

#[test]
fn drafts_gain_where_they_are_right() {
    for (a, cost, is_timed, least) in [
        (1.0, CHEAP, true, 4.5),
        (1.0, SHARED, true, 2.4),
        (1.0, SHARED, false, 2.0),
        (0.8, SHARED, true, 1.25),
        (0.8, SHARED, false, 1.2),
    ] {
        let speedup = Simulation { acceptance: &|_| a, cost, is_timed, ..Simulation::default() }.speedup();
        assert!(speedup > least, "{a}, {is_timed}: {speedup}");
    }
}

#[test]
fn no_text_and_no_machine_loses_more_than_it_may() {
    let linear: &dyn Fn(usize) -> f64 = &|t| t as f64;
    let notes: &dyn Fn(usize) -> f64 = &|t| if t == 1 { 1.0 } else { 4.4 };
    let step: &dyn Fn(usize) -> f64 = &|t| if t < 4 { CHEAP(t) } else { 5.0 };
    let never: &dyn Fn(usize) -> f64 = &|_| 0.0;
    let half = &|_| 0.5;
    let stops = &|at| if at < 30 { 1.0 } else { 0.0 };
    let phases = &|at| if at / 25 % 2 == 0 { 1.0 } else { 0.0 };
    for tokens in [32, 64, 128, 400] {
        for (i, acceptance) in [never, half, stops, phases].into_iter().enumerate() {
            for (j, cost) in [CHEAP, SHARED, linear, notes, step].into_iter().enumerate() {
                for noise in [0.0, 0.1, 0.5] {
                    let simulation = Simulation { tokens, acceptance, cost, noise, ..Simulation::default() };
                    let speedup = simulation.speedup();
                    assert!(speedup >= 0.985, "{tokens}, text {i}, machine {j}, noise {noise}: {speedup}");
                }
            }
        }
    }
}

#[test]
fn an_adversary_gains_no_more_than_the_share() {
    // Each draft is wrong, and whatever is only followed is right.
    for tokens in [64, 400, 2000] {
        let mut statistics = DraftStatistics::new(8);
        for k in [0, 1, 0, 2, 0, 4, 0, 8] {
            statistics.note_time(alone(k, SHARED(k + 1)));
        }
        let mut c = Controller::new(statistics, LENGTHS.to_vec());
        let mut time = 0.0;
        for made in 0..tokens {
            let k = c.choose(REPEATED, 8, &DraftRoom::alone(0, tokens - made));
            if k == 0 {
                c.note_followed(20, true);
            }
            c.note(REPEATED, (k, 0), alone(k, SHARED(k + 1)), 0.0);
            time += SHARED(k + 1);
        }
        assert!(time < 1.016 * tokens as f64, "{tokens}: {time}");
    }
}

#[test]
fn a_machine_that_becomes_faster_or_slower_is_noticed() {
    for factor in [0.3, 3.0] {
        for a in [0.0, 0.3, 0.95] {
            let simulation = Simulation {
                tokens: 1000,
                acceptance: &|_| a,
                slow: &|at, _| if at < 300 { 1.0 } else { factor },
                ..Simulation::default()
            };
            let (speedup, least) = (simulation.speedup(), if a > 0.9 { 1.7 } else { 0.985 });
            assert!(speedup > least, "{factor}, {a}: {speedup}");
        }
    }
}

#[test]
fn disturbed_times_are_forgotten() {
    for factor in [3.0, 6.0, 30.0] {
        let simulation = Simulation {
            tokens: 3000,
            acceptance: &|_| 0.95,
            slow: &|at, t| if (100..160).contains(&at) && t > 1 { factor } else { 1.0 },
            ..Simulation::default()
        };
        assert!(simulation.speedup() > 1.5, "{factor}: {}", simulation.speedup());
    }
}

#[test]
fn later_generations_know_what_earlier_ones_measured() {
    let mut first = Controller::new(DraftStatistics::new(4), vec![4]);
    (0..20).for_each(|_| first.note(DraftSource::Repetition(4), (0, 0), alone(0, 1.0), 0.0));
    (0..20).for_each(|_| first.note_followed(20, true));
    (0..6).for_each(|_| first.note(REPEATED, (4, 4), alone(4, 1.2), 0.0));
    let mut second = Controller::new(first.statistics().clone(), vec![4]);
    assert_eq!(second.choose(REPEATED, 4, &DraftRoom::alone(0, 1000)), 4, "its first pass is a draft");
    assert_eq!(second.report().passes, [], "and it counts its own passes");
    assert_eq!(second.report().break_even.iter().filter(|b| b.is_measured).count(), 1);
    let mut third = Controller::new(first.statistics().clone(), vec![]);
    assert_eq!(third.choose(REPEATED, 4, &DraftRoom::alone(0, 1000)), 0, "no length is prepared");
}

/// A generation with a drafter of acceptance `a`, after a prompt that the drafter has not read.
struct Drafted {
    a: f64,
    /// Time of a drafted token, and of a token that is read, in plain passes.
    drafter: DrafterTime,
    prompt: usize,
    tokens: usize,
    is_timed: bool,
}

impl Drafted {
    /// Returns the time of plain decoding over that with the drafter.
    fn run(&self, seed: u64) -> f64 {
        let mut statistics = DraftStatistics::new(8);
        for k in LENGTHS.into_iter().filter(|_| self.is_timed).flat_map(|k| [0, k, 0, k]) {
            statistics.note_time(alone(k, CHEAP(k + 1)));
        }
        statistics.drafter = Some(self.drafter);
        let mut c = Controller::new(statistics, LENGTHS.to_vec());
        let mut random = Random::new(seed);
        let (mut made, mut time, mut lacking) = (0, 0.0, self.prompt);
        while made < self.tokens {
            let left = self.tokens - made;
            let room = DraftRoom::alone(made, left);
            let paid = c.affordable_tokens(&room);
            if lacking > 8 && lacking.min(64) <= paid {
                let read = lacking.min(64);
                let seconds = self.drafter.reading * read as f64;
                c.note_reading(read, seconds, &room);
                (lacking, time) = (lacking - read, time + seconds);
            }
            let most = if lacking > 8 { 0 } else { 8.min(left - 1) };
            let k = c.choose(DraftSource::Drafter, most, &room);
            let accepted = (0..k).take_while(|_| random.uniform() < self.a).count();
            let making = self.drafter.making * k as f64;
            c.note(DraftSource::Drafter, (k, accepted), alone(k, CHEAP(k + 1)), making);
            time += CHEAP(k + 1) + making;
            made += accepted + 1;
        }
        self.tokens as f64 / time
    }

    fn speedup(&self) -> f64 {
        (1..=10).map(|seed| self.run(seed)).sum::<f64>() / 10.0
    }
}

#[test]
fn a_drafter_is_charged_its_own_time() {
    let of = |a, making, prompt, tokens, is_timed| {
        let drafter = DrafterTime { making, reading: making / 4.0 };
        Drafted { a, drafter, prompt, tokens, is_timed }.speedup()
    };
    for (prompt, tokens, least) in [(0, 400, 1.5), (12, 400, 1.5), (64, 1000, 1.5)] {
        let speedup = of(0.8, 0.05, prompt, tokens, true);
        assert!(speedup > least, "{prompt}, {tokens}: {speedup}");
    }
    for making in [0.02, 0.3, 2.0] {
        for tokens in [32, 128, 1000] {
            for a in [0.0, 0.3, 0.7] {
                for (prompt, is_timed) in [(0, true), (0, false), (20, true), (200, true), (5000, true)] {
                    let speedup = of(a, making, prompt, tokens, is_timed);
                    let what = format!("{a}, {making}, {prompt}, {tokens}, {is_timed}");
                    assert!(speedup >= 0.985, "{what}: {speedup}");
                }
            }
        }
    }
}

/// Checks streams that share passes: a pass over all of them is dearer for a draft than one for a stream alone.
#[test]
fn streams_draft_together_where_their_pass_has_room() {
    for streams in [2, 4] {
        for (a, least) in [(0.9, 1.3), (0.5, 0.985), (0.0, 0.985)] {
            for cost in [CHEAP, SHARED, &|t| t as f64] {
                let mut random = Random::new(3);
                let mut all: Vec<Controller> = (0..streams)
                    .map(|_| Controller::new(DraftStatistics::new(8), LENGTHS.to_vec()))
                    .collect();
                for c in &mut all {
                    (0..40).for_each(|_| c.note_followed(20, random.uniform() < a));
                }
                let (mut made, mut time) = (0, 0.0);
                while made < 2000 * streams {
                    let mut drafted = 0;
                    let mut own = Vec::new();
                    for c in &mut all {
                        let room = DraftRoom { streams, drafted, ..DraftRoom::alone(0, 1000) };
                        own.push(c.choose(REPEATED, 8, &room));
                        drafted += own[own.len() - 1];
                    }
                    let seconds = cost(streams + drafted);
                    for (c, &k) in all.iter_mut().zip(&own) {
                        let accepted = (0..k).take_while(|_| random.uniform() < a).count();
                        if k == 0 {
                            c.note_followed(20, random.uniform() < a);
                        }
                        c.note(REPEATED, (k, accepted), PassTime { seconds, streams, drafted }, 0.0);
                        made += accepted + 1;
                    }
                    time += seconds;
                }
                let speedup = made as f64 / streams as f64 * cost(streams) / time;
                let is_dear = cost(3) > 1.5 * cost(1);
                let least = if is_dear { 0.985 } else { least };
                assert!(speedup >= least, "{streams}, {a}, {}: {speedup}", cost(2));
            }
        }
    }
}
