//! Mistakes that are made on purpose, to see that the simulation notices them.

/// A mistake that is made on purpose, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// A write is called done when those it was first sent to have it, whoever joined meanwhile.
    ForgetsNewcomers,
    /// A repair overwrites what was written to the newcomer meanwhile.
    RepairOverwrites,
    /// What was sent before a connection was given up is not voided.
    NoFence,
    /// A server that comes back keeps what it should not have.
    NoCleaning,
    /// A server that comes back counts as cleaned also of chunks that it was put out of meanwhile.
    ForgetsLeaving,
    /// The owner does not hear that the last server with some of its pages is gone.
    KeepsLossesQuiet,
    /// What a server acknowledged counts though it was lost since, and is back with nothing.
    OldAcknowledgements,
    /// Servers that do not answer for 10 s are gone, and cleaned when they return.
    GivesUpEarly,
    /// Two names of one server are two servers.
    TwoNamesAreTwo,
    /// Who answers a hello is well, whatever it does with requests.
    TrustsHello,
    /// A link on which an answer is late is closed, and a server that turns new ones away counts as dead.
    ClosesLinks,
    /// A copy that was found damaged stays so, and ends the repair that finds it.
    LeavesDamage,
    /// A bitmap is believed to be as long as it was asked for.
    BelievesBitmaps,
    /// A server that is put out is cleaned, and what was sent to it before may come after.
    CleansWithoutFence,
    /// Nothing is known of failure domains.
    IgnoresDomains,
}
