//! A deterministic simulation of replication: the real replicator and the real server logic, in a
//! world that crashes, restarts, cuts, delays, repeats and loses as a seed says.
//!
//! Checks over thousands of seeds: with at most `copies - 1` servers in trouble at a time, a
//! complete replica is complete and no page is lost. That holds even if another server is lost as
//! soon as one is back. With more servers in trouble, every loss is reported to its owner when it
//! happens. After all trouble, no page is under-replicated. Planted mistakes show that the checks
//! can fail.
//!
//! PAGETAX_SEEDS sets the number of seeds of all stories together, without those of forks, which are a
//! tenth as many. The gate runs
//! `PAGETAX_SEEDS=10000 cargo test -p pagetax-remote --test simulation`.

mod client;
mod forks;
mod scale;
mod world;

use client::{Client, Flaw, Links, Load, UNREACHABLE, at};
use pagetax_core::access::Rng;
use std::cell::Cell;
use world::{MS, World};

/// A handful of pages in both chunks, so that writes meet.
const PAGES: [u64; 6] = [0, 1, 7, 255, 256, 300];
/// The pages for which a server has room: enough for all of them.
const PAGES_EACH: u64 = 32;

#[derive(Debug, Clone, Copy)]
struct Story {
    servers: usize,
    copies: usize,
    /// The most servers in trouble at the same time.
    troubled_max: usize,
    faults: u64,
    plot: Plot,
}

/// The kind of trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plot {
    /// Any trouble, to at most `troubled_max` servers.
    Any,
    /// A server is away for a while and comes back with its pages; then another is killed.
    InTurn,
    /// No server is reachable, for less than the time after which the client gives them up.
    Partition,
    /// One server has two names. Servers are killed.
    TwoNames,
    /// A server answers, but takes no pages.
    Gray,
    /// Servers refuse new connections, and one stalls for a moment.
    Hiccup,
    /// A byte changes on a server; then another server is killed.
    Damage,
    /// A server is away, and another is full.
    FullServer,
    /// A server is away for a moment, so that another joins. Before that has caught up, the only
    /// complete server goes away, and a third is killed.
    Blips,
    /// A server answers with too short bitmaps while repairs copy from it.
    ShortBitmaps,
    /// All servers of a rack are killed at once.
    Rack,
    /// The client forks while a server is in any trouble, and the child goes on by itself.
    Forks,
}

/// The longest put beside a server that takes no pages. Three requests to it fail, and other
/// processes hold the CPU meanwhile.
const PUT_MAX: u64 = 8000 * MS;

impl Story {
    /// Returns true if all replicas of a page may be in trouble at a time. The remaining replicas
    /// then count as complete although they miss pages. Those are lost, and the loss is reported.
    fn may_lose(self) -> bool {
        self.plot == Plot::Any && self.troubled_max >= self.copies
    }

    /// Returns true if complete replicas must be complete. Damage exists before the client can know
    /// of it.
    fn has_promises(self) -> bool {
        !self.may_lose() && self.plot != Plot::Damage
    }
}

/// Plays a story. Returns the numbers of writes and reads, or what went wrong.
fn play(seed: u64, story: Story, flaw: Flaw) -> Result<(u64, u64), String> {
    let world = World::new(seed, story.servers, PAGES_EACH);
    match story.plot {
        Plot::TwoNames => world.add_name(0),
        Plot::FullServer => world.lend(story.servers - 1, 1),
        _ => {}
    }
    let client = Client::new(world.clone(), story.copies, flaw, Load::default());
    if story.plot == Plot::Rack && flaw != Flaw::IgnoresDomains {
        let mut replicator = client.replicator.borrow_mut();
        (0..story.servers as u8)
            .for_each(|server| replicator.set_failure_domain(server, rack(server)));
    }
    let over = Cell::new(false);
    let verdict = Cell::new(Ok((0, 0)));
    let main = async {
        verdict.set(run_story(&client, &world, story, seed).await);
        over.set(true);
    };
    let writer = write_on(&client, &over, seed);
    let reader = read_on(&client, &over, seed);
    let control = async {
        let mut links = Links::default();
        while !over.get() {
            client.control(&mut links).await;
            if client.wants_child.get() {
                *client.child.borrow_mut() = client.fork(&mut links).await.map(Box::new);
                client.wants_child.set(false);
            }
            world.sleep(100 * MS).await;
        }
    };
    world.run(
        vec![Box::pin(main), Box::pin(writer), Box::pin(reader), Box::pin(control)],
        2_000_000,
    );
    verdict.into_inner()
}

fn rack(server: u8) -> u64 {
    server as u64 / 2
}

async fn write_on(client: &Client, over: &Cell<bool>, seed: u64) {
    let (mut links, mut rng, mut version) = (Links::default(), Rng::new(seed ^ 0x77), 0);
    while !over.get() {
        let page = PAGES[rng.below(PAGES.len() as u64) as usize];
        if client.busy.borrow().contains(&page) || client.is_resting.get() {
            client.world.sleep(MS).await;
            continue;
        }
        version += 1;
        client.busy.borrow_mut().push(page);
        client.is_putting.set(true);
        let is_put = client.put(&mut links, page, version).await;
        client.is_putting.set(false);
        if is_put {
            client.done.borrow_mut().insert(page, version);
        } else {
            // The servers may have any version; the owner still has the page.
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

/// Causes trouble, lets it pass, and checks the state after it.
async fn run_story(
    client: &Client,
    world: &World,
    story: Story,
    seed: u64,
) -> Result<(u64, u64), String> {
    let mut rng = Rng::new(seed ^ 0x55);
    world.sleep(500 * MS).await;
    for _ in 0..story.faults {
        let troubled = cause_trouble(client, world, story, &mut rng).await;
        world.sleep(rng.below(6000 * MS)).await;
        let child = match story.plot {
            Plot::Forks => Some(forks::fork(client, world).await?),
            _ => None,
        };
        promises(client, story)?;
        (0..story.servers).for_each(|server| world.set_full(server, false));
        for server in troubled {
            heal(world, server);
        }
        heal_fully(client, world, story).await?;
        if let Some(child) = child {
            forks::goes_on(&child, world, story)
                .await
                .map_err(|what| format!("the child: {what}"))?;
        }
        client.is_resting.set(false);
    }
    Ok((client.puts.get(), client.gets.get()))
}

/// Causes trouble. Returns the servers that are in trouble.
async fn cause_trouble(client: &Client, world: &World, story: Story, rng: &mut Rng) -> Vec<usize> {
    let one = rng.below(story.servers as u64) as usize;
    let another = (one + 1 + rng.below(story.servers as u64 - 1) as usize) % story.servers;
    let chunk = at(PAGES[rng.below(PAGES.len() as u64) as usize]);
    match story.plot {
        Plot::Any | Plot::Forks => some_in_trouble(world, story, Vec::new(), rng),
        Plot::InTurn => {
            keep_away(world, one, rng);
            world.sleep(rng.below(3000 * MS)).await;
            heal(world, one);
            world.sleep(rng.below(600 * MS)).await;
            world.crash(another);
            some_in_trouble(world, story, vec![another], rng)
        }
        Plot::Partition => {
            // Threads that waited through the last partition finish first.
            world.sleep(5000 * MS).await;
            (0..story.servers).for_each(|server| world.set_reachable(server, false));
            // Leaves time to reconnect, and for the rest.
            world.sleep(rng.below(UNREACHABLE - 12_000 * MS)).await;
            (0..story.servers).collect()
        }
        Plot::TwoNames => {
            world.crash(one);
            vec![one]
        }
        Plot::Gray => {
            world.set_gray(one, true);
            world.sleep(2000 * MS).await;
            vec![one]
        }
        Plot::Hiccup => {
            world.sleep(3000 * MS).await;
            (0..story.servers).for_each(|server| world.set_full(server, true));
            world.stop(one, 300 * MS + rng.below(1000 * MS));
            world.sleep(15_000 * MS).await;
            Vec::new()
        }
        Plot::Damage => {
            let plan = client.replicator.borrow().read_plan(chunk);
            let [first, second, ..] = *plan.order() else { return Vec::new() };
            client.is_resting.set(true);
            world.sleep(1000 * MS).await;
            PAGES
                .iter()
                .filter(|page| at(**page) == chunk)
                .for_each(|page| client.damage(first, *page));
            // With more than one replica left, a repair may find the damage first.
            world.sleep(if story.copies > 2 { rng.below(100 * MS) } else { 5000 * MS }).await;
            world.crash(second as usize);
            vec![second as usize]
        }
        Plot::FullServer => {
            let away = rng.below(story.servers as u64 - 1) as usize;
            world.set_reachable(away, false);
            vec![away]
        }
        Plot::Blips => {
            let plan = client.replicator.borrow().read_plan(chunk);
            let [whole, blips, ..] = *plan.order() else { return Vec::new() };
            world.set_reachable(blips as usize, false);
            world.sleep(400 * MS + rng.below(400 * MS)).await;
            heal(world, blips as usize);
            world.set_reachable(whole as usize, false);
            world.sleep(rng.below(3000 * MS)).await;
            let holders = client.replicator.borrow().reachable_members(chunk);
            let mut others = holders.iter().filter(|server| *server != whole && *server != blips);
            let Some(third) = others.next() else { return vec![whole as usize] };
            world.crash(third as usize);
            vec![whole as usize, third as usize]
        }
        Plot::ShortBitmaps => {
            world.set_short(one, true);
            world.crash(another);
            world.sleep(3000 * MS).await;
            vec![one, another]
        }
        Plot::Rack => {
            let rack_of_one = rack(one as u8);
            let servers = (0..story.servers).filter(|server| rack(*server as u8) == rack_of_one);
            servers.inspect(|server| world.crash(*server)).collect()
        }
    }
}

fn some_in_trouble(
    world: &World,
    story: Story,
    mut troubled: Vec<usize>,
    rng: &mut Rng,
) -> Vec<usize> {
    for _ in troubled.len()..1 + rng.below(story.troubled_max as u64) as usize {
        let server = rng.below(story.servers as u64) as usize;
        if !troubled.contains(&server) {
            trouble(world, server, rng);
            troubled.push(server);
        }
    }
    troubled
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

/// Makes a server unreachable in one of three ways. It loses no page.
fn keep_away(world: &World, server: usize, rng: &mut Rng) {
    match rng.below(3) {
        0 => world.set_reachable(server, false),
        1 => world.cut_connections(server),
        _ => world.set_slow(server, true),
    }
}

fn heal(world: &World, server: usize) {
    if !world.is_running(server) {
        world.start(server);
    }
    world.set_reachable(server, true);
    world.set_slow(server, false);
    world.set_gray(server, false);
    world.set_short(server, false);
}

/// Checks that complete replicas are complete, if the story promises it.
fn promises(client: &Client, story: Story) -> Result<(), String> {
    if story.has_promises() { client.broken_promise().map_or(Ok(()), Err) } else { Ok(()) }
}

/// Waits until no page is under-replicated. Checks the promises meanwhile.
async fn heal_fully(client: &Client, world: &World, story: Story) -> Result<(), String> {
    for _ in 0..400 {
        world.sleep(100 * MS).await;
        promises(client, story)?;
        let is_replicated = client.replicator.borrow().replicas_missing() == 0;
        let is_at_rest = client.replicator.borrow().next_repairable(at(0)).is_none();
        let all_up = client.replicator.borrow().up().len() == client.servers_known();
        if is_replicated && all_up && (is_at_rest || story.plot != Plot::Rack) {
            match story.plot {
                Plot::Gray if client.longest_put.get() > PUT_MAX => {
                    return Err(format!("a put took {} ms", client.longest_put.get() / MS));
                }
                // A few refusals are normal: two servers are away until the first is back in use.
                Plot::FullServer if client.full.get() > client.puts.get() / 20 => {
                    return Err("pages were refused though a server had room".into());
                }
                _ => {}
            }
            let (lost, unreported) = (client.lost.get(), client.lost_unreported.get());
            return match (lost, unreported) {
                (1.., _) if !story.may_lose() => Err(format!("{lost} pages lost")),
                (_, 1..) => Err(format!("{unreported} pages lost without a report")),
                _ => Ok(()),
            };
        }
    }
    Err("replicas are still missing long after".into())
}

const CAREFUL: Story = Story { servers: 4, copies: 2, troubled_max: 1, faults: 4, plot: Plot::Any };
const PAIR: Story = Story { servers: 2, ..CAREFUL };
const THREE: Story = Story { servers: 5, copies: 3, troubled_max: 2, faults: 3, ..CAREFUL };
const CHAOS: Story = Story { servers: 3, troubled_max: 3, ..CAREFUL };
const SINGLE: Story = Story { servers: 2, copies: 1, troubled_max: 2, ..CAREFUL };
const IN_TURN: Story = Story { servers: 3, plot: Plot::InTurn, ..CAREFUL };
const PARTITION: Story = Story { servers: 3, faults: 2, plot: Plot::Partition, ..CAREFUL };
const TWO_NAMES: Story = Story { servers: 2, faults: 3, plot: Plot::TwoNames, ..CAREFUL };
const GRAY: Story = Story { servers: 3, faults: 3, plot: Plot::Gray, ..CAREFUL };
const HICCUP: Story = Story { servers: 2, copies: 1, faults: 2, plot: Plot::Hiccup, ..CAREFUL };
const DAMAGE: Story = Story { servers: 4, faults: 3, plot: Plot::Damage, ..CAREFUL };
const DAMAGE_OF_THREE: Story = Story { servers: 5, copies: 3, ..DAMAGE };
const FULL_SERVER: Story = Story { servers: 3, faults: 3, plot: Plot::FullServer, ..CAREFUL };
const BLIPS: Story = Story { faults: 3, plot: Plot::Blips, ..CAREFUL };
const SHORT_BITMAPS: Story = Story { faults: 3, plot: Plot::ShortBitmaps, ..CAREFUL };
const FORKS: Story = Story { plot: Plot::Forks, ..CAREFUL };
const RACK: Story = Story { faults: 3, plot: Plot::Rack, ..CAREFUL };

/// The default number of seeds of all stories.
const SEEDS: u64 = 2000;

/// Plays a story with its share of the seeds, in thousandths.
fn all_well(story: Story, part: u64) {
    let said = std::env::var("PAGETAX_SEEDS").ok();
    let all = said.map_or(SEEDS, |seeds| seeds.parse().expect("PAGETAX_SEEDS is a number"));
    let (mut puts, mut gets) = (0, 0);
    let seeds = (all * part).div_ceil(1000);
    for seed in 0..seeds {
        match play(seed, story, Flaw::None) {
            Ok(done) => (puts, gets) = (puts + done.0, gets + done.1),
            Err(what) => panic!("seed {seed} of {story:?}: {what}"),
        }
    }
    println!("{seeds} seeds, {puts} writes and {gets} reads");
}

fn is_found(story: Story, flaw: Flaw) {
    // A panic counts as found.
    let play = |seed| {
        std::panic::catch_unwind(|| play(seed, story, flaw).err())
            .unwrap_or_else(|_| Some("a panic".into()))
    };
    let found = (0..2000).find_map(|seed| Some((seed, play(seed)?)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{flaw:?} is not noticed"));
    println!("{flaw:?}: seed {seed}: {what}");
}

#[test]
fn one_server_in_trouble_loses_nothing_of_two_copies() {
    all_well(CAREFUL, 150);
    all_well(PAIR, 50);
}

#[test]
fn one_server_after_the_other_loses_nothing_of_two_copies() {
    all_well(IN_TURN, 150);
}

#[test]
fn two_servers_in_trouble_lose_nothing_of_three_copies() {
    all_well(THREE, 50);
}

#[test]
fn whatever_happens_all_is_replicated_again_in_the_end() {
    all_well(CHAOS, 100);
    all_well(SINGLE, 50);
}

#[test]
fn servers_that_cannot_be_reached_for_a_while_lose_nothing() {
    all_well(PARTITION, 50);
}

#[test]
fn one_server_of_two_names_has_one_copy() {
    all_well(TWO_NAMES, 50);
}

#[test]
fn a_server_that_takes_no_pages_is_left() {
    all_well(GRAY, 50);
}

#[test]
fn a_moment_beside_full_tables_loses_nothing() {
    all_well(HICCUP, 50);
}

#[test]
fn damage_that_was_found_is_repaired() {
    all_well(DAMAGE, 40);
    all_well(DAMAGE_OF_THREE, 30);
}

#[test]
fn a_full_server_does_not_keep_another_from_taking_pages() {
    all_well(FULL_SERVER, 40);
}

#[test]
fn no_write_lies_on_one_server_that_catches_up() {
    all_well(BLIPS, 60);
}

#[test]
fn a_short_bitmap_is_an_error_of_its_server() {
    all_well(SHORT_BITMAPS, 30);
}

#[test]
fn a_rack_that_fails_takes_one_copy() {
    all_well(RACK, 50);
}

#[test]
fn parent_and_child_of_a_fork_lose_nothing() {
    all_well(FORKS, 100);
}

#[test]
fn planted_forks_beside_repairs_are_found() {
    is_found(FORKS, Flaw::ForksBesideRepairs);
}

#[test]
fn planted_haste_with_silent_servers_is_found() {
    is_found(PARTITION, Flaw::GivesUpEarly);
}

#[test]
fn planted_faith_in_names_is_found() {
    is_found(TWO_NAMES, Flaw::TwoNamesAreTwo);
}

#[test]
fn planted_faith_in_hellos_is_found() {
    is_found(GRAY, Flaw::TrustsHello);
}

#[test]
fn planted_closing_of_slow_links_is_found() {
    is_found(HICCUP, Flaw::ClosesLinks);
}

#[test]
fn planted_damage_left_is_found() {
    is_found(DAMAGE, Flaw::LeavesDamage);
}

#[test]
fn planted_damage_in_the_way_of_a_repair_is_found() {
    is_found(DAMAGE_OF_THREE, Flaw::LeavesDamage);
}

#[test]
fn planted_faith_in_bitmaps_is_found() {
    is_found(SHORT_BITMAPS, Flaw::BelievesBitmaps);
}

#[test]
fn planted_cleaning_without_fence_is_found() {
    is_found(BLIPS, Flaw::CleansWithoutFence);
}

#[test]
fn planted_ignorance_of_racks_is_found() {
    is_found(RACK, Flaw::IgnoresDomains);
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
    is_found(IN_TURN, Flaw::ForgetsLeaving);
}

#[test]
fn planted_old_acknowledgements_are_found() {
    is_found(CAREFUL, Flaw::OldAcknowledgements);
}

#[test]
fn planted_silence_about_losses_is_found() {
    is_found(CHAOS, Flaw::KeepsLossesQuiet);
}
