use super::*;
use anemoe_io::Random;

/// A text and a machine, by the number of tokens that were made so far. Times are in passes for one token.
struct Simulation<'a> {
    tokens: usize,
    /// Acceptance of a drafted token.
    acceptance: &'a dyn Fn(usize) -> f64,
    /// Seconds of a pass over so many tokens.
    cost: &'a dyn Fn(usize, usize) -> f64,
    /// Length of the match; 0 for none.
    matched: &'a dyn Fn(usize) -> usize,
    /// Seconds of preparing a length.
    preparing: f64,
    /// Largest factor of a random disturbance of each pass is `1 + noise`, the smallest its inverse.
    noise: f64,
    /// Factor of the first pass of each length.
    cold: f64,
    seed: u64,
}

const CHEAP: &dyn Fn(usize, usize) -> f64 = &|_, t| 1.0 + 0.1 * (t - 1) as f64;

impl Default for Simulation<'_> {
    fn default() -> Self {
        Simulation {
            tokens: 500,
            acceptance: &|_| 0.0,
            cost: CHEAP,
            matched: &|_| 4,
            preparing: 1.0,
            noise: 0.0,
            cold: 1.0,
            seed: 7,
        }
    }
}

impl Simulation<'_> {
    /// Decodes with the controller. Returns the seconds of plain decoding over its seconds, and its figures.
    fn run(&self) -> (f64, SpeculationReport) {
        let mut c = Controller::new(DraftStatistics::new(8));
        c.assume_preparing(self.preparing);
        let mut random = Random::new(self.seed);
        let (mut made, mut seconds, mut plain) = (0, 0.0, 0.0);
        let mut was_run = [false; 9];
        while made < self.tokens {
            let (left, matched) = (self.tokens - made, (self.matched)(made));
            let k = if matched == 0 { 0 } else { c.choose(matched, 8.min(left - 1), left) };
            if !c.is_prepared(k) {
                c.note_prepared(k, self.preparing);
                seconds += self.preparing;
            }
            let a = (self.acceptance)(made);
            let accepted = (0..k).take_while(|_| random.uniform() < a).count();
            if k == 0 && matched > 0 {
                c.note_followed(matched, random.uniform() < a);
            }
            let disturbed = (1.0 + self.noise).powf(2.0 * random.uniform() - 1.0);
            let is_first = k > 0 && !std::mem::replace(&mut was_run[k], true);
            let time = (self.cost)(made, k + 1) * disturbed * if is_first { self.cold } else { 1.0 };
            c.note(matched, k, accepted, time);
            seconds += time;
            plain += (made..=made + accepted).map(|at| (self.cost)(at, 1)).sum::<f64>();
            made += accepted + 1;
        }
        (plain / seconds, c.report())
    }

    fn speedup(&self) -> f64 {
        self.run().0
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

#[test]
fn it_gains_where_there_is_something_to_gain_and_loses_nothing_elsewhere() {
    let linear = |_, t: usize| t as f64;
    let notes = |_, t: usize| if t == 1 { 1.0 } else { 4.4 };
    let of = |a: f64, cost| Simulation { acceptance: &move |_| a, cost, ..Simulation::default() }.speedup();
    assert!(of(0.9, CHEAP) > 2.0);
    for a in [0.0, 0.2, 0.5, 0.7, 0.9] {
        for cost in [CHEAP, &linear, &notes] {
            assert!(of(a, cost) >= 0.99, "{a}, {}: {}", cost(0, 2), of(a, cost));
        }
    }
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
fn a_machine_that_becomes_faster_is_noticed() {
    // Drafts pay while every pass takes twice as long; behind that nothing is right.
    for a in [0.0, 0.1, 0.2, 0.3] {
        let simulation = Simulation {
            tokens: 4000,
            acceptance: &move |at| if at < 300 { 0.95 } else { a },
            cost: &|at, t| (1.0 + 0.3 * (t - 1) as f64) * if at < 300 { 2.0 } else { 1.0 },
            matched: &|_| 20,
            ..Simulation::default()
        };
        assert!(simulation.speedup() > 1.04, "{a}: {}", simulation.speedup());
    }
}

#[test]
fn disturbed_times_are_forgotten() {
    for factor in [3.0, 6.0, 30.0] {
        let simulation = Simulation {
            tokens: 3000,
            acceptance: &|_| 0.95,
            cost: &move |at, t| CHEAP(at, t) * if (100..160).contains(&at) && t > 1 { factor } else { 1.0 },
            ..Simulation::default()
        };
        assert!(simulation.speedup() > 1.5, "{factor}: {}", simulation.speedup());
    }
}

#[test]
fn noise_does_not_make_drafts_lose() {
    // Near the break-even, more noise makes more wrong choices.
    for (noise, least) in [(0.2, 0.99), (0.5, 0.985)] {
        for a in [0.0, 0.3, 0.5, 0.6] {
            let speedups = (1..=40).map(|seed| {
                let simulation = Simulation {
                    tokens: 1000,
                    acceptance: &move |_| a,
                    cost: &|_, t| 1.0 + 0.6 * (t - 1) as f64,
                    noise,
                    seed,
                    ..Simulation::default()
                };
                // The mean factor of the noise, (n - 1 / n) / (2 ln n) for n = 1 + noise, is no loss.
                let n: f64 = 1.0 + noise;
                simulation.speedup() * (n - 1.0 / n) / (2.0 * n.ln())
            });
            let mean = speedups.sum::<f64>() / 40.0;
            assert!(mean >= least, "{noise}, {a}: {mean}");
        }
    }
}

#[test]
fn dear_lengths_are_prepared_for_long_repetitions_only() {
    let repeats_until = |end: usize, preparing: f64| {
        let matched = move |at| if at < end + 20 { 20 } else { 0 };
        let acceptance = move |at| if at < end { 1.0 } else { 0.0 };
        Simulation {
            tokens: 1000,
            acceptance: &acceptance,
            matched: &matched,
            preparing,
            ..Simulation::default()
        }
        .run()
    };
    for preparing in [2.0, 5.0, 10.0, 30.0, 100.0] {
        let (speedup, report) = repeats_until(20, preparing);
        assert!(speedup >= 0.99, "{preparing}: {speedup}, {report:?}");
    }
    let (speedup, _) = repeats_until(1000, 30.0);
    assert!(speedup > 2.0, "{speedup}");
}

#[test]
fn drafts_that_fail_at_first_are_made_again() {
    // A text in which drafts gain 1.3 times begins, for some seeds, with drafts of which nothing is right.
    for seed in 1..=100 {
        let simulation = Simulation {
            tokens: 256,
            acceptance: &|_| 0.8,
            cost: &|_, t| 1.0 + 0.45 * ((t - 1) as f64).powf(0.8),
            matched: &|_| 24,
            preparing: 3.0,
            noise: 0.1,
            cold: 1.6,
            seed,
        };
        let (speedup, report) = simulation.run();
        assert!(speedup > 1.05, "{seed}: {speedup}, {report:?}");
    }
}

#[test]
fn short_generations_lose_little() {
    for tokens in [10, 20, 40, 64, 128] {
        let simulation = Simulation {
            tokens,
            acceptance: &|at| if at < 12 { 1.0 } else { 0.0 },
            cost: &|_, t| 1.0 + 0.4 * (t - 1) as f64,
            matched: &|_| 20,
            preparing: 0.0,
            ..Simulation::default()
        };
        // A text that was right twelve times and is never right again costs a few drafts.
        assert!(simulation.speedup() >= 0.985, "{tokens}: {}", simulation.speedup());
    }
}

#[test]
fn texts_that_stop_repeating_lose_what_their_beginning_was_worth() {
    // Lengths are tried while all is right, each first with a cold pass, and nothing is right any more when they could pay.
    for (tokens, right, slope, least) in
        [(128, 20, 0.3, 0.98), (128, 40, 0.6, 0.98), (128, 60, 0.9, 0.975), (400, 20, 0.45, 0.99)]
    {
        let speedups = (1..=40).map(|seed| {
            let simulation = Simulation {
                tokens,
                acceptance: &move |at| if at < right { 1.0 } else { 0.0 },
                cost: &move |_, t| 1.0 + slope * (t - 1) as f64,
                matched: &|_| 24,
                preparing: 0.0,
                noise: 0.1,
                cold: 1.6,
                seed,
            };
            simulation.speedup()
        });
        let mean = speedups.sum::<f64>() / 40.0;
        assert!(mean >= least, "{tokens}, {right}, {slope}: {mean}");
    }
}

#[test]
fn later_generations_know_what_earlier_ones_measured() {
    let mut first = Controller::new(DraftStatistics::new(4));
    (0..20).for_each(|_| first.note(4, 0, 0, 1.0));
    (0..20).for_each(|_| first.note_followed(20, true));
    (0..3).for_each(|_| first.note(20, 4, 4, 1.5));
    let mut second = Controller::new(first.statistics().clone());
    second.set_prepared(4);
    assert_eq!(second.choose(20, 4, 1000), 4, "its first pass is a draft");
    assert_eq!(second.report().passes, [], "and it counts its own passes");
    assert_eq!(second.report().break_even.iter().filter(|b| b.is_measured).count(), 1);
}

#[test]
fn nothing_is_prepared_without_evidence() {
    let mut c = Controller::new(DraftStatistics::new(8));
    (0..20).for_each(|_| c.note(4, 0, 0, 1.0));
    assert_eq!(c.choose(20, 8, 1000), 0, "nothing was seen behind such matches");
    (0..16).for_each(|_| c.note_followed(20, true));
    assert_eq!(c.choose(20, 8, 2), 0, "too few tokens are left");
    assert!(c.choose(20, 8, 1000) > 0);
}
