//! Deterministic simulation of replication: the real replicator and the real server logic, in a world
//! that crashes, restarts, cuts, delays, repeats and loses as a seed says.
//!
//! What is checked, over thousands of seeds: with never more than `copies - 1` servers in trouble at a
//! time a complete copy is complete and nothing is lost, also when another server is lost as soon as one that
//! was away is back; with more, nothing is lost without its owner's being told when it happens; and when all is
//! well again, every page has all its copies. That the checks can fail is shown with mistakes made on purpose.

mod client;
mod world;

use client::{Client, Flaw, Links, REGION_PAGES};
use pagetax_core::access::Rng;
use std::cell::Cell;
use world::{MS, World};

/// A handful of pages in both chunks, so that writes meet.
const PAGES: [u64; 6] = [0, 1, 7, 255, 256, 300];

#[derive(Debug, Clone, Copy)]
struct Story {
    servers: usize,
    copies: usize,
    /// Servers in trouble at the same time, at most.
    troubled_max: usize,
    faults: u64,
    /// Each time a server is away for a while, and comes back with what it had; then another is killed.
    in_turn: bool,
}

impl Story {
    /// All copies of a page may be in trouble at a time. What is left then counts as complete though
    /// pages are missing from it: they are lost, of which the owner is told.
    fn may_lose(self) -> bool {
        self.troubled_max >= self.copies
    }
}

/// What went wrong, if anything.
fn play(seed: u64, story: Story, flaw: Flaw) -> Result<(u64, u64), String> {
    let world = World::new(seed, story.servers, REGION_PAGES + 64);
    let client = Client::new(world.clone(), story.copies, flaw);
    let over = Cell::new(false);
    let verdict = Cell::new(Ok((0, 0)));
    let main = async {
        verdict.set(tell(&client, &world, story, seed).await);
        over.set(true);
    };
    let writer = write_on(&client, &over, seed);
    let reader = read_on(&client, &over, seed);
    let control = async {
        let mut links = Links::default();
        while !over.get() {
            client.control(&mut links).await;
            world.sleep(100 * MS).await;
        }
    };
    world.run(
        vec![Box::pin(main), Box::pin(writer), Box::pin(reader), Box::pin(control)],
        2_000_000,
    );
    verdict.into_inner()
}

async fn write_on(client: &Client, over: &Cell<bool>, seed: u64) {
    let (mut links, mut rng, mut version) = (Links::default(), Rng::new(seed ^ 0x77), 0);
    while !over.get() {
        let page = PAGES[rng.below(PAGES.len() as u64) as usize];
        if client.busy.borrow().contains(&page) {
            client.world.sleep(MS).await;
            continue;
        }
        version += 1;
        client.busy.borrow_mut().push(page);
        if client.put(&mut links, page, version).await {
            client.done.borrow_mut().insert(page, version);
        } else {
            // What the servers have of it is anybody's guess; its owner still has it.
            client.done.borrow_mut().remove(&page);
        }
        client.busy.borrow_mut().retain(|busy| *busy != page);
        client.puts.set(client.puts.get() + 1);
        client.world.sleep(rng.below(40 * MS)).await;
    }
}

async fn read_on(client: &Client, over: &Cell<bool>, seed: u64) {
    let (mut links, mut rng) = (Links::default(), Rng::new(seed ^ 0x99));
    while !over.get() {
        client.world.sleep(1 + rng.below(40 * MS)).await;
        let page = PAGES[rng.below(PAGES.len() as u64) as usize];
        let version = client.done.borrow().get(&page).copied();
        let (Some(version), false) = (version, client.busy.borrow().contains(&page)) else {
            continue;
        };
        client.busy.borrow_mut().push(page);
        if !client.get(&mut links, page, version).await {
            client.lost.set(client.lost.get() + 1);
            client.done.borrow_mut().remove(&page);
        }
        client.busy.borrow_mut().retain(|busy| *busy != page);
        client.gets.set(client.gets.get() + 1);
    }
}

/// Brings trouble, lets it pass, and looks at what is left.
async fn tell(
    client: &Client,
    world: &World,
    story: Story,
    seed: u64,
) -> Result<(u64, u64), String> {
    let mut rng = Rng::new(seed ^ 0x55);
    world.sleep(500 * MS).await;
    for _ in 0..story.faults {
        let mut troubled = Vec::new();
        if story.in_turn {
            let away = rng.below(story.servers as u64) as usize;
            keep_away(world, away, &mut rng);
            world.sleep(rng.below(3000 * MS)).await;
            mend(world, away);
            world.sleep(rng.below(600 * MS)).await;
            let other = (away + 1 + rng.below(story.servers as u64 - 1) as usize) % story.servers;
            world.crash(other);
            troubled.push(other);
        }
        for _ in troubled.len()..1 + rng.below(story.troubled_max as u64) as usize {
            let server = rng.below(story.servers as u64) as usize;
            if !troubled.contains(&server) {
                trouble(world, server, &mut rng);
                troubled.push(server);
            }
        }
        world.sleep(rng.below(6000 * MS)).await;
        promises(client, story)?;
        for server in troubled {
            mend(world, server);
        }
        whole_again(client, world, story).await?;
    }
    Ok((client.puts.get(), client.gets.get()))
}

fn trouble(world: &World, server: usize, rng: &mut Rng) {
    match rng.below(5) {
        0 => world.crash(server),
        1 => {
            world.crash(server);
            world.start(server);
        }
        _ => keep_away(world, server, rng),
    }
}

/// Nothing that it has is lost.
fn keep_away(world: &World, server: usize, rng: &mut Rng) {
    match rng.below(3) {
        0 => world.set_reachable(server, false),
        1 => world.cut_connections(server),
        _ => world.set_slow(server, true),
    }
}

fn mend(world: &World, server: usize) {
    if !world.is_running(server) {
        world.start(server);
    }
    world.set_reachable(server, true);
    world.set_slow(server, false);
}

/// Where nothing may be lost, complete copies are complete at any time.
fn promises(client: &Client, story: Story) -> Result<(), String> {
    if story.may_lose() { Ok(()) } else { client.broken_promise().map_or(Ok(()), Err) }
}

/// Waits until every page has its copies; checks the promises on the way.
async fn whole_again(client: &Client, world: &World, story: Story) -> Result<(), String> {
    for _ in 0..400 {
        world.sleep(100 * MS).await;
        promises(client, story)?;
        let is_whole = client.replicator.borrow().copies_missing() == 0;
        let all_up = client.replicator.borrow().up().len() == story.servers;
        if is_whole && all_up {
            let (lost, untold) = (client.lost.get(), client.lost_untold.get());
            return match (lost, untold) {
                (1.., _) if !story.may_lose() => Err(format!("{lost} pages lost")),
                (_, 1..) => Err(format!("{untold} pages lost of which the owner was not told")),
                _ => Ok(()),
            };
        }
    }
    Err("copies are still missing long after".into())
}

const CAREFUL: Story = Story { servers: 4, copies: 2, troubled_max: 1, faults: 4, in_turn: false };
const IN_TURN: Story = Story { servers: 3, copies: 2, troubled_max: 1, faults: 4, in_turn: true };
const PAIR: Story = Story { servers: 2, ..CAREFUL };
const THREE: Story = Story { servers: 5, copies: 3, troubled_max: 2, faults: 3, in_turn: false };
const CHAOS: Story = Story { servers: 3, copies: 2, troubled_max: 3, faults: 4, in_turn: false };
const SINGLE: Story = Story { servers: 2, copies: 1, troubled_max: 2, faults: 4, in_turn: false };

fn all_well(story: Story, seeds: std::ops::Range<u64>) {
    let (mut puts, mut gets) = (0, 0);
    for seed in seeds {
        match play(seed, story, Flaw::None) {
            Ok(done) => (puts, gets) = (puts + done.0, gets + done.1),
            Err(what) => panic!("seed {seed} of {story:?}: {what}"),
        }
    }
    println!("{puts} writes and {gets} reads");
}

fn is_found(story: Story, flaw: Flaw) {
    let found = (0..2000).find_map(|seed| Some((seed, play(seed, story, flaw).err()?)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{flaw:?} is not noticed"));
    println!("{flaw:?}: seed {seed}: {what}");
}

#[test]
fn one_server_in_trouble_loses_nothing_of_two_copies() {
    all_well(CAREFUL, 0..1500);
    all_well(PAIR, 0..500);
}

#[test]
fn one_server_after_the_other_loses_nothing_of_two_copies() {
    all_well(IN_TURN, 0..1500);
}

#[test]
fn two_servers_in_trouble_lose_nothing_of_three_copies() {
    all_well(THREE, 0..500);
}

#[test]
fn whatever_happens_all_is_whole_again_in_the_end() {
    all_well(CHAOS, 0..1000);
    all_well(SINGLE, 0..500);
}

#[test]
fn planted_newcomers_forgotten_is_found() {
    is_found(CAREFUL, Flaw::ForgetsNewcomers);
}

#[test]
fn planted_repair_that_overwrites_is_found() {
    is_found(CAREFUL, Flaw::RepairOverwrites);
}

#[test]
fn planted_missing_fence_is_found() {
    is_found(CAREFUL, Flaw::NoFence);
}

#[test]
fn planted_missing_cleaning_is_found() {
    is_found(CAREFUL, Flaw::NoCleaning);
}

#[test]
fn planted_forgotten_leaving_is_found() {
    is_found(PAIR, Flaw::ForgetsLeaving);
}

#[test]
fn planted_old_acknowledgements_are_found() {
    is_found(CAREFUL, Flaw::OldAcknowledgements);
}

#[test]
fn planted_silence_about_losses_is_found() {
    is_found(CHAOS, Flaw::KeepsLossesQuiet);
}
