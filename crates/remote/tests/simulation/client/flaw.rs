//! Mistakes that are planted on purpose, to see that the simulation finds them.

/// A mistake that is made on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// A write counts as done when its first targets have it, although servers joined meanwhile.
    ForgetsNewcomers,
    /// A repair overwrites pages that a writer has sent to the new member meanwhile.
    RepairOverwrites,
    /// The client does not void requests of a connection that it has closed.
    NoFence,
    /// The client does not discard the stale replicas of a server that rejoins.
    NoCleaning,
    /// A server that rejoins counts as clean even for chunks from which it was removed meanwhile.
    ForgetsLeaving,
    /// The client does not report the loss of the last server that had some pages.
    KeepsLossesQuiet,
    /// An acknowledgement counts although its server was lost since, and is back without pages.
    OldAcknowledgements,
    /// Servers that do not answer for 10 s count as gone, and are cleaned when they return.
    GivesUpEarly,
    /// Two names of one server count as two servers.
    TwoNamesAreTwo,
    /// A server that answers a hello counts as healthy, although its requests fail.
    TrustsHello,
    /// The client closes a link on which a reply is late, and a server that refuses new links
    /// counts as dead.
    ClosesLinks,
    /// A damaged replica is not repaired, and ends the repair that finds it.
    LeavesDamage,
    /// The client does not check the length of a bitmap.
    BelievesBitmaps,
    /// A removed server is cleaned without a fence, so that earlier requests may arrive later.
    CleansWithoutFence,
    /// A child of a fork gets a state of later than its snapshots, while repairs move pages.
    ForksBesideRepairs,
    /// The client ignores failure domains.
    IgnoresDomains,
}
